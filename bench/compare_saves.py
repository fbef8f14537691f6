"""`python -m bench save`: compare checkpoints with a plain copy of the state and with torch.distributed.checkpoint."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from bench import command_line
from bench.bootstrap import ConfidenceInterval, paired_interval
from bench.environment import THREADS_PER_RANK, describe_machine
from bench.time_saves import BACKGROUND, CONTENDERS, COPY, Timing, time_saves
from minidist.errors import UserError, format_count
from minidist.tools.launch import RankServer

# (what, contender, baseline, upper limit of the ratio)
TARGETS = (
    ("stall", BACKGROUND, COPY, 1.2),
    ("save", BACKGROUND, "torch DCP async_save", 1.0),
    ("save", "minidist", "torch DCP save", 1.0),
    ("peak memory", BACKGROUND, "torch DCP async_save", 1.0),
    ("peak memory", "minidist", "torch DCP save", 1.0),
)
QUANTITIES = ("stall", "save", "peak memory")


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options.

    server: launches the ranks; None starts a new rank server.
    """
    options = _parse_options(arguments)

    def run(server: RankServer) -> None:
        _check_options(options)
        records = {}
        for ranks in options.ranks or [1, 2]:
            values = _measure(server, ranks, options)
            records[ranks] = {
                "median": {name: [float(np.median(one)) for one in by.values()] for name, by in values.items()},
                "ratios": _report(ranks, values, options),
            }
        header = {"machine": describe_machine("gloo"), "rounds": options.rounds, "mib": options.mib}
        command_line.write_json(options.json, header | {"ranks": records})

    return command_line.exit_code(run, server)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    description = "Compare checkpoints, in the background and not, with a plain copy and with torch's DCP."
    parser = argparse.ArgumentParser("python -m bench save", description=description)
    add = parser.add_argument
    add("--ranks", type=int, action="append", metavar="N", help="number of ranks; may be repeated (default: 1 and 2)")
    rounds_help = "rounds to measure; every contender saves once per round (default: %(default)s)"
    add("--rounds", type=int, default=10, metavar="N", help=rounds_help)
    add(
        "--mib",
        type=int,
        default=1024,
        metavar="N",
        help="size of the state of all ranks in MiB (default: %(default)s)",
    )
    add("--folder", type=Path, help="a folder on the disk to measure (default: the current folder)")
    command_line.add_output_options(parser, "save", "json")
    return parser.parse_args(arguments)


def _check_options(options: argparse.Namespace) -> None:
    """Raise UserError for invalid options."""
    for name, value in (
        ("rounds", options.rounds),
        ("mib", options.mib),
        *(("ranks", n) for n in options.ranks or [1]),
    ):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")


def _measure(server: RankServer, ranks: int, options: argparse.Namespace) -> dict[str, dict[str, np.ndarray]]:
    """Return {contender: {quantity: per round}}: of the slowest rank, memory of all ranks together."""
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        arguments = (options.rounds, options.mib * 2**20, folder)
        launch = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": "gloo"}
        by_rank: list[list[dict[str, Timing]]] = server.run(time_saves, ranks, arguments, **launch).values
    values = {}
    for name in CONTENDERS:
        timings = np.array([[one_round[name] for one_round in rounds] for rounds in by_rank])  # (ranks, rounds, 3)
        timings[:, :, 2] = timings[:, :, 2].clip(2**20)  # a smaller growth is noise
        stall, save = timings[:, :, 0].max(axis=0), timings[:, :, 1].max(axis=0)
        values[name] = dict(zip(QUANTITIES, (stall, save, timings[:, :, 2].sum(axis=0)), strict=True))
    return values


def _report(ranks: int, values: dict[str, dict[str, np.ndarray]], options: argparse.Namespace) -> list[dict]:
    """Print a table of medians and the ratios that have targets; return the ratios."""
    console = command_line.make_console()
    title = (
        f"{format_count(ranks, 'rank')}, {options.mib} MiB of float32 in all, medians of "
        f"{format_count(options.rounds, 'round')}"
    )
    table = Table("", "training waits (ms)", "until on disk (ms)", "peak memory grows (MiB)", title=title)
    for name, by in values.items():
        stall, save, memory = (float(np.median(by[quantity])) for quantity in QUANTITIES)
        table.add_row(name, f"{stall * 1e3:.0f}", f"{save * 1e3:.0f}", f"{memory / 2**20:.0f}")
    console.print(table)
    ratios = []
    for quantity, name, baseline, limit in TARGETS:
        ratio: ConfidenceInterval = paired_interval(values[name][quantity], values[baseline][quantity])
        verdict = "met" if ratio.median <= limit else "MISSED"
        console.print(f"{quantity} of {name} / {baseline}: {ratio}, target <= {limit}: {verdict}", highlight=False)
        ratios.append({"quantity": quantity, "name": name, "baseline": baseline, "ratio": ratio, "limit": limit})
    return ratios
