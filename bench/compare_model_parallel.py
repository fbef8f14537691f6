"""`python -m bench model`: compare tensor and pipeline parallelism with torch's DTensor and pipelining."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command_line
from bench.bootstrap import ConfidenceInterval
from bench.compare_contenders import StepTimes, require_same_kernel
from bench.environment import THREADS_PER_RANK, describe_machine, describe_workload
from bench.model_parallel_contenders import TENSOR_PARALLEL, BatchRange, Makers, pipeline_makers
from bench.time_contenders import TOLERANCE, single_process_steps, time_in_turns
from bench.workload import Workload
from minidist.comm import GroupSpec, World, bind
from minidist.errors import RunError, UserError
from minidist.mesh import Mesh
from minidist.tools.launch import RankServer

SCHEDULES = ("gpipe", "1f1b", "interleaved")
# Upper limits of minidist's step time over the baseline's: (contender, baseline, backend or None for any) -> limit.
# There is none for the simple engine.
MAX_RATIOS = {
    ("tp", "DTensor", None): 0.90,
    ("tp", "half the batch", "shm"): 1.15,
    ("tp sequence", "DTensor sequence", None): 0.85,
    **{(schedule, f"torch {schedule}", None): 0.95 for schedule in SCHEDULES},
    **{(f"{name} simple", name, None): None for name in ("tp", "tp sequence", "gpipe", "1f1b")},
    ("tp simple", "DTensor", None): None,
    ("tp sequence simple", "DTensor sequence", None): None,
    **{(f"{schedule} simple", f"torch {schedule}", None): None for schedule in ("gpipe", "1f1b")},
}


@dataclass(frozen=True)
class BenchLayout:
    """Ranks, backend and micro-batches of one benchmark run; 1 micro-batch means tensor parallelism, else pipelines."""

    ranks: int
    backend: str
    micro_batches: int = 1

    @property
    def title(self) -> str:
        """Description for tables and messages, such as "tensor parallel, 2 ranks, gloo"."""
        if self.micro_batches == 1:
            return f"tensor parallel, {self.ranks} ranks, {self.backend}"
        return f"pipeline, {self.ranks} stages, {self.micro_batches} micro-batches, {self.backend}"

    def makers(self) -> Makers:
        """Return the constructors of the contenders, by name."""
        if self.micro_batches == 1:
            return TENSOR_PARALLEL
        by_schedule = [pipeline_makers(schedule, self.micro_batches) for schedule in SCHEDULES]
        return {name: make for makers in by_schedule for name, make in makers.items()}

    def adapt_workload(self, work: Workload) -> Workload:
        """Add layers if necessary: interleaved 1F1B over four stages needs eight."""
        if self.micro_batches == 1:
            return work
        layers = max(work.model.num_layers, 2 * self.ranks)
        return dataclasses.replace(work, model=dataclasses.replace(work.model, num_layers=layers))


@dataclass(frozen=True)
class PairResult:
    """Step times of a minidist contender and its baseline in one layout.

    ours_s, baseline_s: median seconds per step. ratio, cpu_ratio: minidist's over the baseline's wall time, and CPU
    time of all ranks, which a busy machine disturbs less. max_ratio: upper limit of `ratio`; None if there is none.
    """

    layout: str
    ours: str
    baseline: str
    ours_s: float
    baseline_s: float
    ratio: ConfidenceInterval
    cpu_ratio: ConfidenceInterval
    max_ratio: float | None

    @property
    def verdict(self) -> str:
        """Whether the median ratio meets its limit: "met", or "MISSED" with the limit; "" if there is none."""
        if self.max_ratio is None:
            return ""
        return "met" if self.ratio.median <= self.max_ratio else f"MISSED: <= {self.max_ratio:.2f}"


def check_and_time(world: World, layout: BenchLayout, work: Workload, rounds: int, steps: int) -> tuple[dict, dict]:
    """On every rank: check all contenders against a single process, then time them in turns.

    Returns the timings and the optimizer kernels, by contender. Raises RunError if a contender's loss or gradient norm
    differs by more than TOLERANCE.
    """
    group = bind(world, Mesh(dp=world.size), [GroupSpec("bench", ("dp",))])["bench"]
    work = layout.adapt_workload(work)
    contenders = {name: make(work, world) for name, make in layout.makers().items()}
    loader, size, references = work.build_loader(), work.global_batch, single_process_steps(work)
    batches = [BatchRange(loader, step * size, size) for step in range(work.distinct_batches)]
    for name, contender in contenders.items():
        for i, reference in enumerate(references):
            loss_and_norm = contender.step(batches[i])
            expected = (reference.loss, reference.grad_norm)
            pairs = zip(loss_and_norm, expected, strict=True) if contender.exact else ()
            error = max((abs(got - exact) / abs(exact) for got, exact in pairs), default=0.0)
            if not error <= TOLERANCE:
                raise RunError(
                    f"{name} is {error:.1e} off a single process in step {i} of {layout.title}, so it is not timed"
                )
    timings = time_in_turns(contenders, batches, group, rounds, steps)
    return timings, {name: contender.kernel for name, contender in contenders.items()}


def compare_layout(
    server: RankServer, layout: BenchLayout, work: Workload, rounds: int, steps: int
) -> list[PairResult]:
    """Run all contenders of one layout on fresh ranks; return one result per pair of minidist and baseline."""
    launch_options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": layout.backend}
    by_rank = server.run(check_and_time, layout.ranks, (layout, work, rounds, steps), **launch_options).values
    require_same_kernel(by_rank[0][1])
    times, results = StepTimes([timings for timings, _ in by_rank], steps), []
    for (ours, baseline, backend), limit in MAX_RATIOS.items():
        if ours in times.wall and baseline in times.wall:
            ratios = [times.ratio(ours, baseline, clock) for clock in ("wall", "cpu")]
            medians = [float(np.median(times.wall[name])) for name in (ours, baseline)]
            max_ratio = limit if backend in (None, layout.backend) else None
            results.append(PairResult(layout.title, ours, baseline, *medians, *ratios, max_ratio))
    return results


def print_results(results: Sequence[PairResult], console: Console) -> None:
    """Print one table per layout."""
    for title in dict.fromkeys(result.layout for result in results):
        table = Table(title=title, title_justify="left")
        for column in ("minidist", "baseline"):
            table.add_column(column, no_wrap=True)
        for column in ("minidist ms", "baseline ms", "ratio [95 %]", "CPU ratio", "target"):
            table.add_column(column, justify="right", no_wrap=True)
        for result in (result for result in results if result.layout == title):
            milliseconds = (f"{seconds * 1e3:.1f}" for seconds in (result.ours_s, result.baseline_s))
            ratios = (str(result.ratio), f"{result.cpu_ratio.median:.3f}")
            table.add_row(result.ours, result.baseline, *milliseconds, *ratios, result.verdict)
        console.print(table)


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None, work: Workload | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 a contender that computes wrongly.

    server: launches the ranks; None starts a new rank server. work: None for the default workload.
    """
    description = (
        "Compare minidist's tensor and pipeline parallelism with torch DTensor and torch.distributed.pipelining."
    )
    parser = argparse.ArgumentParser("python -m bench model", description=description)
    add = parser.add_argument
    rounds_help = "rounds to measure; every contender takes one turn per round (default: %(default)s)"
    add("--rounds", type=int, default=20, metavar="N", help=rounds_help)
    add("--steps", type=int, default=2, metavar="N", help="training steps per turn (default: %(default)s)")
    add("--backend", choices=("gloo", "shm"), action="append", help="backend; may be repeated (default: both)")
    stages_help = "pipeline stages, 2 to 4; 0 leaves pipelines out; may be repeated (default: 2 and 4)"
    add("--stages", type=int, action="append", metavar="N", help=stages_help)
    command_line.add_output_options(parser, "model", "json")
    options = parser.parse_args(arguments)
    console, work = command_line.make_console(), work or Workload()
    stages = [count for count in (options.stages if options.stages is not None else [2, 4]) if count]
    layouts = [
        layout
        for backend in options.backend or ("gloo", "shm")
        for layout in (BenchLayout(2, backend), *(BenchLayout(count, backend, 2 * count) for count in stages))
    ]

    def run(server: RankServer) -> None:
        if options.rounds < 1 or options.steps < 1 or any(not 2 <= count <= 4 for count in stages):
            raise UserError(
                f"--rounds {options.rounds} --steps {options.steps} --stages {stages}: at least 1 round of 1 step, and "
                f"2 to 4 stages, as the {work.global_batch} samples are divided into two micro-batches per stage"
            )
        results: list[PairResult] = []
        for layout in layouts:
            results += (new := compare_layout(server, layout, work, options.rounds, options.steps))
            print_results(new, console)
        header = {
            "machine": describe_machine("gloo and shm"),
            "workload": describe_workload(work),
            "rounds": options.rounds,
        }
        pairs = [asdict(result) | {"verdict": result.verdict} for result in results]
        command_line.write_json(options.json, header | {"results": pairs})
        console.print(f"results in {options.json}", highlight=False, soft_wrap=True)

    return command_line.exit_code(run, server)
