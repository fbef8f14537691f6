"""`python -m bench local`: the step times of local SGD and DiLoCo against training without communication.

The ranks are on two nodes: torchrun agents in two network namespaces, whose link is as slow as `--mbit` says. All
contenders are in the same processes and take turns; a round of one is h steps, and the last step averages the replicas.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from bench import command_line
from bench.bootstrap import ConfidenceInterval, paired_interval, slowest_rank_times
from bench.environment import describe_machine
from bench.namespaces import two_nodes, why_impossible
from minidist.errors import RunError, UserError, format_count
from minidist.tools.launch import RankServer

LIMIT = 1.05  # wanted: the step time of local SGD and DiLoCo, relative to no communication at all
NODES = 2
DEADLINE_S = 1800.0
_PORT = 29400  # free in a namespace of our own


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 failed run, 2 invalid options. server: not needed."""
    options = _parse_options(arguments)

    def run(_: RankServer) -> None:
        _check_options(options)
        timings = time_contenders(options)
        seconds = {name: slowest_rank_times(np.array(times)) / options.h for name, times in timings.items()}
        ratios = {name: paired_interval(of, seconds["no communication"]) for name, of in seconds.items()}
        ratios_to_torch = {name: paired_interval(of, seconds["torch local SGD"]) for name, of in seconds.items()}
        _report(options, seconds, ratios, ratios_to_torch)
        results = {name: {"step_s": list(of), "ratio": ratios[name]._asdict()} for name, of in seconds.items()}
        settings = {name: getattr(options, name) for name in ("h", "rounds", "mbit", "ranks")}
        command_line.write_json(options.json, {"machine": describe_machine("gloo"), **settings, "contenders": results})

    return command_line.exit_code(run, server)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    description = "Time the steps of local SGD and DiLoCo on two nodes with a slow link between them."
    parser = argparse.ArgumentParser("python -m bench local", description=description)
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="N", help="ranks on both nodes together (default: %(default)s)")
    add("--h", type=int, default=50, metavar="H", help="steps between two merges (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="rounds of h steps (default: %(default)s)")
    add("--mbit", type=float, default=100.0, metavar="M", help="speed of the link in Mbit/s (default: %(default)g)")
    command_line.add_output_options(parser, "local", "json")
    return parser.parse_args(arguments)


def _check_options(options: argparse.Namespace) -> None:
    """Raise UserError for invalid options."""
    for name, least in (("ranks", NODES), ("h", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    if options.ranks % NODES:
        raise UserError(f"--ranks is {options.ranks}, and there are {NODES} nodes: give an even number of ranks")
    if not options.mbit > 0:
        raise UserError(f"--mbit is {options.mbit:g}; it must be above 0")
    if why := why_impossible():
        raise UserError(f"bench local needs two network namespaces: {why}")


def time_contenders(options: argparse.Namespace) -> dict[str, list]:
    """Return the start and end of every round, by contender and rank: {name: (ranks, rounds, 2)}, in seconds."""
    with two_nodes() as nodes, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        for node in nodes:
            node.limit_rate(options.mbit)
        agents = []
        for number, node in enumerate(nodes):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
            torchrun += ["--nproc-per-node", str(options.ranks // NODES), "--node-rank", str(number)]
            torchrun += ["--master-addr", nodes[0].address, "--master-port", str(_PORT)]
            program = ["-m", "bench.time_local_steps", str(options.h), str(options.rounds), folder]
            network = ["env", f"GLOO_SOCKET_IFNAME={node.interface}", "OMP_NUM_THREADS=1"]
            agent = subprocess.Popen(
                ["ip", "netns", "exec", node.namespace, *network, *torchrun, *program],
                cwd=Path(__file__).parents[1],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(agent.kill)
            agents.append(agent)
        try:
            errors = [agent.communicate(timeout=DEADLINE_S)[1] for agent in agents]
        except subprocess.TimeoutExpired:
            raise RunError(f"the ranks have not ended within {DEADLINE_S:g} s") from None
        for agent, error in zip(agents, errors, strict=True):
            if agent.returncode:
                raise RunError(f"an agent of torchrun ended with exit code {agent.returncode}:\n{error[:6000]}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
        return {name: [times[name] for times in ranks] for name in ranks[0]}


def _report(
    options: argparse.Namespace,
    seconds: dict[str, np.ndarray],
    ratios: dict[str, ConfidenceInterval],
    ratios_to_torch: dict[str, ConfidenceInterval],
) -> None:
    """Print the table and write the results as JSON. seconds: of every round, by contender."""
    rounds = format_count(options.rounds, "round")
    title = f"{options.ranks} ranks on 2 nodes, {options.mbit:g} Mbit/s, h = {options.h}, {rounds}"
    table = Table(title=title, caption="medians of paired ratios, with 95 % intervals")
    for column in ("", "ms per step", "to no communication", "to torch local SGD"):
        table.add_column(column, justify="right" if column else "left")
    for name, times in seconds.items():
        table.add_row(name, f"{1e3 * np.median(times):.1f}", str(ratios[name]), str(ratios_to_torch[name]))
    console = command_line.make_console()
    console.print(table)
    for name in ("local SGD", "DiLoCo"):
        verdict = "reached" if ratios[name].median <= LIMIT else "not reached"
        console.print(f"{name}: {ratios[name].median:.3f} of no communication; wanted at most {LIMIT}: {verdict}")
