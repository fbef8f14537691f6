"""`python -m bench comm`: compare the shm backend with gloo: single operations, steps of torch DDP and FSDP2."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from bench import command_line, time_backends
from bench.backend_report import OperationResult, plot, print_results
from bench.bootstrap import ConfidenceInterval, median_interval, paired_ratios, slowest_rank_times
from bench.environment import THREADS_PER_RANK, describe_machine
from bench.time_backends import BACKENDS, COPY, SIZES
from bench.workload import Workload
from minidist.errors import RunError, UserError, format_count
from minidist.tools.launch import RankServer

# Relative to the loss, for 4 ranks: the backends add in different orders. With 2 ranks losses are equal bit for bit.
LOSS_TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None, work: Workload | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 losses that differ between the backends.

    server: launches the ranks; None starts a new rank server. work: None for the default workload.
    """
    options = _parse_options(arguments)
    options.ranks = options.ranks or [2, 4]

    def run(server: RankServer) -> None:
        _check_options(options)
        results, losses = [], {}
        for ranks in options.ranks:
            results += compare_operations(server, ranks, options.rounds, tuple(SIZES[: options.sizes]))
        if options.steps:
            steps, losses = compare_steps(server, options.ranks[-1], options.rounds, options.steps, work)
            results += steps
        _report(results, losses, options)

    return command_line.exit_code(run, server)


def _report(results: list[OperationResult], losses: dict, options: argparse.Namespace) -> None:
    """Print the results as a table and write them as JSON and as a plot."""
    console = command_line.make_console()
    print_results(results, console)
    cores = describe_machine()["cores"]
    title = f"{format_count(options.rounds, 'round')}, float32, {THREADS_PER_RANK} thread per rank, {cores} cores"
    header = {"machine": describe_machine("gloo and shm"), "rounds": options.rounds, "losses": losses}
    records = [asdict(result) | {"min_ratio": result.min_ratio, "verdict": result.verdict} for result in results]
    command_line.write_json(options.json, header | {"results": records})
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    plot(results, title, options.picture)
    console.print(f"results in {options.json}, plot in {options.picture}", highlight=False, soft_wrap=True)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    description = (
        "Compare minidist's shared-memory backend shm with gloo: single operations, and steps of torch DDP and FSDP2."
    )
    parser = argparse.ArgumentParser("python -m bench comm", description=description)
    add = parser.add_argument
    add("--ranks", type=int, action="append", metavar="N", help="number of ranks; may be repeated (default: 2 and 4)")
    rounds_help = "rounds to measure; every operation runs on both backends in each round (default: %(default)s)"
    add("--rounds", type=int, default=20, metavar="N", help=rounds_help)
    steps_help = "training steps of DDP and FSDP2 per round, on the last --ranks; 0 for none (default: %(default)s)"
    add("--steps", type=int, default=2, metavar="N", help=steps_help)
    sizes_help = "number of tensor sizes, smallest first: 4 KiB, 256 KiB, 4 MiB, 64 MiB (default: all four)"
    add("--sizes", type=int, default=len(SIZES), metavar="N", help=sizes_help)
    command_line.add_output_options(parser, "comm", "json", "picture")
    return parser.parse_args(arguments)


def _check_options(options: argparse.Namespace) -> None:
    """Raise UserError for invalid options."""
    if not sys.platform.startswith("linux"):
        raise UserError("the shm backend runs on Linux only, so there is nothing to compare here")
    for ranks in options.ranks:
        if not 2 <= ranks <= Workload().global_batch:
            raise UserError(f"--ranks {ranks}: the comparison needs 2 to {Workload().global_batch} ranks")
    if options.rounds < 1 or not 1 <= options.sizes <= len(SIZES) or options.steps < 0:
        raise UserError(
            f"--rounds {options.rounds} --sizes {options.sizes} --steps {options.steps}: at least 1 round, "
            f"1 to {len(SIZES)} sizes, at least 0 steps"
        )


def compare_operations(server: RankServer, ranks: int, rounds: int, sizes: tuple[int, ...]) -> list[OperationResult]:
    """Time all operations of all sizes (bytes) on both backends, on `ranks` fresh ranks."""
    launch_options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0}
    by_rank = server.run(time_backends.time_operations, ranks, (rounds, sizes), **launch_options).values
    timings = {
        key: np.array([one_rank[key] for one_rank in by_rank]) / time_backends.repetitions(key[1]) for key in by_rank[0]
    }
    results = []
    for name, size, backend in timings:
        if backend == "shm":
            gloo, shm, copy = timings[name, size, "gloo"], timings[name, size, "shm"], timings[COPY, size, "memory"]
            copy_ratio = median_interval(paired_ratios(slowest_rank_times(shm), slowest_rank_times(copy)))
            results.append(_compare_timings(ranks, name, size, gloo, shm, copy_ratio))
    return results


def compare_steps(
    server: RankServer, ranks: int, rounds: int, steps: int, work: Workload | None
) -> tuple[list[OperationResult], dict]:
    """Time training steps of torch DDP and FSDP2 on both backends; return the results and all losses.

    steps: per round. Raises RunError if the losses on shm differ from those on gloo.
    """
    launch_options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0}
    by_rank = server.run(time_backends.time_steps, ranks, (rounds, steps, work or Workload()), **launch_options).values
    results, losses = [], {name: [rank_losses[name] for _, rank_losses in by_rank] for name in by_rank[0][1]}
    for wrapper in ("DDP", "FSDP2"):
        gloo, shm = (np.array(losses[f"{wrapper} {backend}"]) for backend in BACKENDS)
        error = float((np.abs(gloo - shm) / gloo).max())
        if error > (0 if ranks == 2 else LOSS_TOLERANCE):
            raise RunError(f"{wrapper}: the losses on shm are {error:.1e} off those on gloo, with {ranks} ranks")
        by_backend = [np.array([timings[wrapper, backend] for timings, _ in by_rank]) / steps for backend in BACKENDS]
        results.append(_compare_timings(ranks, wrapper, 0, *by_backend))
    return results, losses


def _compare_timings(
    ranks: int, name: str, size: int, gloo: np.ndarray, shm: np.ndarray, copy_ratio: ConfidenceInterval | None = None
) -> OperationResult:
    """Return the paired ratios of one operation on both backends.

    gloo, shm: start, end and CPU time, (ranks, rounds, 3).
    """
    wall_times = [slowest_rank_times(timings) for timings in (gloo, shm)]
    cpu_times = [timings[:, :, 2].sum(axis=0) for timings in (gloo, shm)]
    ratio, cpu_ratio = (median_interval(paired_ratios(*pair)) for pair in (wall_times, cpu_times))
    gloo_s, shm_s = (float(np.median(seconds)) for seconds in wall_times)
    return OperationResult(ranks, name, size, gloo_s, shm_s, ratio, cpu_ratio, copy_ratio)
