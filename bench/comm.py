"""`python -m bench comm`: every operation on gloo and on shm in the same run, and torch's own steps on both."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from bench import comm_rounds, command
from bench.comm_report import Row, draw, print_rows
from bench.comm_rounds import COPY, SIZES
from bench.facts import THREADS_PER_RANK, machine_facts
from bench.statistics import Interval, median_interval, paired_ratios, step_times
from bench.workload import Workload
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

# Other roundings after some steps of AdamW, relative to the loss; at 2 ranks there are none.
LOSS_TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None, work: Workload | None = None) -> int:
    """Run the command; returns the exit code: 2 for a wrong request, 1 for losses that differ.

    server: where the ranks come from; work: what is trained. One of its own when None.
    """
    options = _parse(arguments)
    options.ranks = options.ranks or [2, 4]

    def run(server: RankServer) -> None:
        _check(options)
        rows, losses = [], {}
        for ranks in options.ranks:
            rows += compare(server, ranks, options.rounds, tuple(SIZES[: options.sizes]))
        if options.steps:
            found, losses = compare_steps(server, options.ranks[-1], options.rounds, options.steps, work)
            rows += found
        _tell(rows, losses, options)

    return command.exit_code(run, server)


def _tell(rows: list[Row], losses: dict, options: argparse.Namespace) -> None:
    """What was found: a table, a file, a picture."""
    console = command.console()
    print_rows(rows, console)
    cores = machine_facts()["cores"]
    title = f"{options.rounds} rounds in turns, float32, {THREADS_PER_RANK} thread per rank, {cores} cores"
    facts = {"machine": machine_facts("gloo and shm"), "rounds": options.rounds, "losses": losses}
    told = [asdict(row) | {"wanted": row.wanted, "verdict": row.verdict} for row in rows]
    command.write(options.json, facts | {"rows": told})
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, title, options.picture)
    console.print(f"figures in {options.json}, picture in {options.picture}", highlight=False, soft_wrap=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench comm", description="shared memory beside gloo, in turns")
    add = parser.add_argument
    add("--ranks", type=int, action="append", help="number of ranks, may be repeated (default: 2 and 4)")
    add("--rounds", type=int, default=20, help="turns of every operation (default: %(default)s)")
    add("--steps", type=int, default=2, help="of DDP and FSDP2 in each turn, 0 for none (default: %(default)s)")
    add("--sizes", type=int, default=len(SIZES), help="how many of 4 KiB, 256 KiB, 4 MiB, 64 MiB (default: all)")
    command.add_outputs(parser, "comm", "json", "picture")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> None:
    if not sys.platform.startswith("linux"):
        raise UserError("the backend shm is for Linux: there is nothing to compare here")
    for ranks in options.ranks:
        if not 2 <= ranks <= Workload().global_batch:
            raise UserError(f"--ranks {ranks}: a comparison needs 2 to {Workload().global_batch} ranks")
    if options.rounds < 1 or not 1 <= options.sizes <= len(SIZES) or options.steps < 0:
        raise UserError(
            f"--rounds {options.rounds} --sizes {options.sizes} --steps {options.steps}: at least 1 round, "
            f"1 to {len(SIZES)} sizes, no negative steps"
        )


def compare(server: RankServer, ranks: int, rounds: int, sizes: tuple[int, ...]) -> list[Row]:
    """Every operation at every size on `ranks` ranks."""
    options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0}
    seen = server.run(comm_rounds.operations, ranks, (rounds, sizes), **options).values
    found = {key: np.array([spans[key] for spans in seen]) / comm_rounds.repeats(key[1]) for key in seen[0]}
    rows = []
    for name, size, backend in found:
        if backend == "shm":
            gloo, shm, copy = found[name, size, "gloo"], found[name, size, "shm"], found[COPY, size, "memory"]
            copies = median_interval(paired_ratios(step_times(shm), step_times(copy)))
            rows.append(_row(ranks, name, size, gloo, shm, copies))
    return rows


def compare_steps(
    server: RankServer, ranks: int, rounds: int, per_round: int, work: Workload | None
) -> tuple[list[Row], dict]:
    """A step of DDP and of FSDP2 on both. Raises RunError when the losses differ."""
    options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0}
    seen = server.run(comm_rounds.steps, ranks, (rounds, per_round, work or Workload()), **options).values
    rows, losses = [], {name: [found[name] for _, found in seen] for name in seen[0][1]}
    for wrapper in ("DDP", "FSDP2"):
        gloo, shm = (np.array(losses[f"{wrapper} {backend}"]) for backend in comm_rounds.BACKENDS)
        off = float((np.abs(gloo - shm) / gloo).max())
        if off > (0 if ranks == 2 else LOSS_TOLERANCE):
            raise RunError(f"{wrapper}: the losses on shm are {off:.1e} off those on gloo at {ranks} ranks")
        spans = [np.array([found[wrapper, b] for found, _ in seen]) for b in comm_rounds.BACKENDS]
        rows.append(_row(ranks, wrapper, 0, *(one / per_round for one in spans)))
    return rows, losses


def _row(ranks: int, name: str, size: int, gloo: np.ndarray, shm: np.ndarray, copies: Interval | None = None) -> Row:
    """gloo, shm: (ranks, rounds, 3) start, end and CPU time of one operation."""
    times, cpu = [step_times(one) for one in (gloo, shm)], [one[:, :, 2].sum(axis=0) for one in (gloo, shm)]
    ratio, of_cpu = (median_interval(paired_ratios(*pair)) for pair in (times, cpu))
    return Row(ranks, name, size, *(float(np.median(one)) for one in times), ratio, of_cpu, copies)
