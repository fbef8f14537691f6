"""`python -m bench model`: step time and peak memory of tensor, pipeline and context parallelism.

The fast and the simple engine are compared with torch's DTensor and pipelining, and where torch has no counterpart that
runs on the CPU, with one process and with training without communication.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command_line, peak_memory
from bench.bootstrap import ConfidenceInterval
from bench.compare_contenders import StepTimes, require_same_kernel
from bench.contender_report import format_mib
from bench.contenders import NO_COMMUNICATION
from bench.environment import THREADS_PER_RANK, describe_machine, describe_workload
from bench.model_parallel_contenders import (
    ONE_PROCESS,
    TENSOR_PARALLEL,
    BatchRange,
    Makers,
    context_parallel_makers,
    mesh_makers,
    pipeline_makers,
)
from bench.time_contenders import TOLERANCE, single_process_steps, time_in_turns
from bench.workload import Workload
from minidist.comm import GroupSpec, World, bind
from minidist.errors import RunError, UserError
from minidist.mesh import Mesh
from minidist.tools.launch import RankServer

SCHEDULES = ("gpipe", "1f1b", "interleaved")
# The meshes that are measured. On a mesh with one axis, each variant of that axis is a contender.
MESHES = (
    *(Mesh(**{axis: ranks}) for ranks in (2, 4) for axis in ("tp", "pp", "cp")),
    *(Mesh(pp=2, tp=2), Mesh(cp=2, tp=2), Mesh(pp=2, cp=2)),
)
# Upper limits of minidist's step time over the baseline's: (contender, baseline, backend or None for any) -> limit.
# There is none for the simple engine, for context parallelism and for meshes with several axes.
MAX_RATIOS = {
    ("tp", "DTensor", None): 0.90,
    ("tp", NO_COMMUNICATION, "shm"): 1.15,
    ("tp sequence", "DTensor sequence", None): 0.85,
    **{(schedule, f"torch {schedule}", None): 0.95 for schedule in SCHEDULES},
    **{(f"{name} simple", name, None): None for name in ("tp", "tp sequence", "gpipe", "1f1b")},
    **{(f"{name} simple", name, None): None for name in ("ring", "ulysses", "mesh")},
    **{
        (name, baseline, None): None
        for name in ("ring", "ring simple", "ulysses", "ulysses simple", "mesh", "mesh simple")
        for baseline in (ONE_PROCESS, NO_COMMUNICATION)
    },
    ("tp simple", "DTensor", None): None,
    ("tp sequence simple", "DTensor sequence", None): None,
    **{(f"{schedule} simple", f"torch {schedule}", None): None for schedule in ("gpipe", "1f1b")},
}


@dataclass(frozen=True)
class BenchLayout:
    """Mesh and backend of one benchmark run."""

    mesh: Mesh
    backend: str

    @property
    def axes(self) -> dict[str, int]:
        """The axes of more than one rank, with their sizes."""
        return {axis: size for axis, size in self.mesh.sizes.items() if size > 1}

    @property
    def name(self) -> str:
        """Name of the mesh, for the option `--only`, such as "tp2" or "pp2-tp2"."""
        return "-".join(f"{axis}{size}" for axis, size in self.axes.items())

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step: two per pipeline stage; 1 without pipeline."""
        return 2 * self.mesh.pp if self.mesh.pp > 1 else 1

    @property
    def title(self) -> str:
        """Description for tables and messages, such as "pp2, 4 micro-batches, gloo"."""
        micro_batches = f"{self.micro_batches} micro-batches, " if self.micro_batches > 1 else ""
        return f"{self.name}, {micro_batches}{self.backend}"

    def makers(self) -> Makers:
        """Return the constructors of the contenders, by name."""
        if len(self.axes) > 1:
            return mesh_makers(self.mesh, self.micro_batches)
        if self.mesh.tp > 1:
            return TENSOR_PARALLEL
        if self.mesh.cp > 1:
            return context_parallel_makers()
        by_schedule = [pipeline_makers(schedule, self.micro_batches) for schedule in SCHEDULES]
        return {name: make for makers in by_schedule for name, make in makers.items()}

    def adapt_workload(self, work: Workload) -> Workload:
        """Add layers if necessary: interleaved 1F1B over four stages needs eight."""
        if self.mesh.pp == 1:
            return work
        layers = max(work.model.num_layers, 2 * self.mesh.pp)
        return dataclasses.replace(work, model=dataclasses.replace(work.model, num_layers=layers))


@dataclass(frozen=True)
class PairResult:
    """Step times and peak memory of a minidist contender and its baseline in one layout.

    ours_s, baseline_s: median seconds per step. ratio, cpu_ratio: minidist's over the baseline's wall time, and CPU
    time of all ranks, which a busy machine disturbs less. max_ratio: upper limit of `ratio`; None if there is none.
    ours_bytes, baseline_bytes: peak of tensors and shared-memory segments on the rank with the highest peak (see
    `peak_memory`); None if not measured.
    """

    layout: str
    ours: str
    baseline: str
    ours_s: float
    baseline_s: float
    ratio: ConfidenceInterval
    cpu_ratio: ConfidenceInterval
    max_ratio: float | None
    ours_bytes: int | None = None
    baseline_bytes: int | None = None

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
    contenders = {name: make(work, world) for name, make in layout.makers().items()}
    batches, references = global_batches(work), single_process_steps(work)
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


def global_batches(work: Workload) -> list[BatchRange]:
    """Return the global batches of all steps, before they repeat."""
    loader, size = work.build_loader(), work.global_batch
    return [BatchRange(loader, step * size, size) for step in range(work.distinct_batches)]


def measure_tensor_peak(world: World, layout: BenchLayout, name: str, work: Workload) -> int:
    """On every rank: return this rank's peak memory in bytes while the contender `name` trains alone."""
    make = layout.makers()[name]
    return peak_memory.measure_peak_of_steps(lambda: make(work, world), global_batches(work))


def compare_layout(
    server: RankServer, layout: BenchLayout, work: Workload, rounds: int, steps: int, with_memory: bool = True
) -> list[PairResult]:
    """Run all contenders of one layout on fresh ranks; return one result per pair of minidist and baseline.

    Their memory is measured afterwards, each contender alone on fresh ranks.
    """
    work, ranks = layout.adapt_workload(work), layout.mesh.world_size
    launch_options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": layout.backend}
    by_rank = server.run(check_and_time, ranks, (layout, work, rounds, steps), **launch_options).values
    require_same_kernel(by_rank[0][1])
    times, results = StepTimes([timings for timings, _ in by_rank], steps), []
    peaks = {
        name: max(server.run(measure_tensor_peak, ranks, (layout, name, work), **launch_options).values)
        for name in (times.wall if with_memory else ())
    }
    for (ours, baseline, backend), limit in MAX_RATIOS.items():
        if ours in times.wall and baseline in times.wall:
            ratios = [times.ratio(ours, baseline, clock) for clock in ("wall", "cpu")]
            medians = [float(np.median(times.wall[name])) for name in (ours, baseline)]
            max_ratio = limit if backend in (None, layout.backend) else None
            memory = peaks.get(ours), peaks.get(baseline)
            results.append(PairResult(layout.title, ours, baseline, *medians, *ratios, max_ratio, *memory))
    return results


def print_results(results: Sequence[PairResult], console: Console) -> None:
    """Print one table per layout."""
    for title in dict.fromkeys(result.layout for result in results):
        table = Table(title=title, title_justify="left")
        for column in ("minidist", "baseline"):
            table.add_column(column, no_wrap=True)
        for column in ("ms, both", "ratio [95 %]", "CPU", "peak MiB, both", "target"):
            table.add_column(column, justify="right", no_wrap=True)
        for result in (result for result in results if result.layout == title):
            milliseconds = f"{result.ours_s * 1e3:.1f} / {result.baseline_s * 1e3:.1f}"
            ratios = (str(result.ratio), f"{result.cpu_ratio.median:.3f}")
            mebibytes = f"{format_mib(result.ours_bytes)} / {format_mib(result.baseline_bytes)}"
            table.add_row(result.ours, result.baseline, milliseconds, *ratios, mebibytes, result.verdict)
        console.print(table)


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None, work: Workload | None = None) -> int:
    """Run the command; return the exit code: 0 done, 2 invalid options, 1 a contender that computes wrongly.

    server: launches the ranks; None starts a new rank server. work: None for the default workload.
    """
    description = (
        "Compare minidist's tensor and pipeline parallelism with torch DTensor and torch.distributed.pipelining, "
        "and its context parallelism with one process."
    )
    parser = argparse.ArgumentParser("python -m bench model", description=description)
    add = parser.add_argument
    rounds_help = "rounds to measure; every contender takes one turn per round (default: %(default)s)"
    add("--rounds", type=int, default=20, metavar="N", help=rounds_help)
    add("--steps", type=int, default=2, metavar="N", help="training steps per turn (default: %(default)s)")
    add("--backend", choices=("gloo", "shm"), action="append", help="backend; may be repeated (default: both)")
    add("--ranks", type=int, action="append", metavar="N", help="2 or 4 ranks; may be repeated (default: both)")
    names = ", ".join(BenchLayout(mesh, "").name for mesh in MESHES)
    add("--only", action="append", metavar="MESH", help=f"only this mesh; may be repeated; one of: {names}")
    add("--no-memory", action="store_true", help="do not measure memory, only time")
    command_line.add_output_options(parser, "model", "json")
    options = parser.parse_args(arguments)
    console, work = command_line.make_console(), work or Workload()
    layouts = [
        layout
        for backend in options.backend or ("gloo", "shm")
        for layout in (BenchLayout(mesh, backend) for mesh in MESHES)
        if layout.mesh.world_size in (options.ranks or (2, 4)) and (not options.only or layout.name in options.only)
    ]

    def run(server: RankServer) -> None:
        if options.rounds < 1 or options.steps < 1:
            raise UserError(f"--rounds {options.rounds} --steps {options.steps}: at least 1 round of 1 step")
        chosen = {layout.mesh.world_size for layout in layouts} | {layout.name for layout in layouts}
        for value in (*(options.ranks or ()), *(options.only or ())):
            if value not in chosen:
                raise UserError(f"--ranks or --only {value}: the meshes are {names}, and --only selects among --ranks")
        results: list[PairResult] = []
        for layout in layouts:
            results += (
                new := compare_layout(server, layout, work, options.rounds, options.steps, not options.no_memory)
            )
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
