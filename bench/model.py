"""`python -m bench model`: one model on several ranks, beside DTensor and torch.distributed.pipelining, in turns."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command
from bench.contest import Times, same_kernel
from bench.facts import THREADS_PER_RANK, machine_facts, workload_facts
from bench.model_peers import TENSOR, BatchRange, Makers, pipeline_makers
from bench.rounds import TOLERANCE, one_process, take_turns
from bench.statistics import Interval
from bench.workload import Workload
from minidist.comm import GroupSpec, World, bind
from minidist.errors import RunError, UserError
from minidist.mesh import Mesh
from minidist.tools.launch import RankServer

KINDS = ("gpipe", "1f1b", "interleaved")
# Ours over theirs, at most: (ours, theirs, backend or None for any) -> limit.
WANTED = {
    ("tp", "DTensor", None): 0.90,
    ("tp", "half the batch", "shm"): 1.15,
    ("tp sequence", "DTensor sequence", None): 0.85,
    **{(kind, f"torch {kind}", None): 0.95 for kind in KINDS},
}


@dataclass(frozen=True)
class Contest:
    """Contenders that take turns in one run. micro_batches: 1 for tensor parallelism, else those of the pipelines."""

    ranks: int
    backend: str
    micro_batches: int = 1

    @property
    def title(self) -> str:
        if self.micro_batches == 1:
            return f"tensor parallel, {self.ranks} ranks, {self.backend}"
        return f"pipeline, {self.ranks} stages, {self.micro_batches} micro-batches, {self.backend}"

    def makers(self) -> Makers:
        if self.micro_batches == 1:
            return TENSOR
        return {name: make for kind in KINDS for name, make in pipeline_makers(kind, self.micro_batches).items()}

    def work(self, work: Workload) -> Workload:
        """Interleaved over four stages needs eight layers."""
        if self.micro_batches == 1:
            return work
        layers = max(work.model.num_layers, 2 * self.ranks)
        return dataclasses.replace(work, model=dataclasses.replace(work.model, num_layers=layers))


@dataclass(frozen=True)
class Row:
    """Ours beside another. step_s: median seconds of a step; ratio: ours over theirs, of step times; cpu: of the CPU
    times of all ranks, which a busy machine disturbs less."""

    contest: str
    ours: str
    theirs: str
    ours_s: float
    theirs_s: float
    ratio: Interval
    cpu: Interval
    wanted: float | None

    @property
    def verdict(self) -> str:
        if self.wanted is None:
            return ""
        return "ok" if self.ratio.median <= self.wanted else f"wanted {self.wanted:.2f}"


def turns(world: World, contest: Contest, work: Workload, rounds: int, steps: int) -> tuple[dict, dict]:
    """On every rank: check all contenders against one process, then time them. Returns spans and kernels by name.

    Raises RunError when a contender's losses or gradient norms are others than those of one process.
    """
    table = bind(world, Mesh(dp=world.size), [GroupSpec("bench", ("dp",))])["bench"]
    work = contest.work(work)
    contenders = {name: make(work, world) for name, make in contest.makers().items()}
    loader, size, wanted = work.loader(), work.global_batch, one_process(work)
    batches = [BatchRange(loader, step * size, size) for step in range(work.distinct_steps)]
    for name, contender in contenders.items():
        for i, want in enumerate(wanted):
            numbers = contender.step(batches[i])
            pairs = zip(numbers, (want.loss, want.grad_norm), strict=True) if contender.exact else ()
            off = max((abs(got - exact) / abs(exact) for got, exact in pairs), default=0.0)
            if not off <= TOLERANCE:
                raise RunError(f"{name} is {off:.1e} off one process in step {i} of {contest.title}: it is not timed")
    spans = take_turns(contenders, batches, table, rounds, steps)
    return spans, {name: contender.kernel for name, contender in contenders.items()}


def compare(server: RankServer, contest: Contest, work: Workload, rounds: int, steps: int) -> list[Row]:
    options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": contest.backend}
    seen = server.run(turns, contest.ranks, (contest, work, rounds, steps), **options).values
    same_kernel(seen[0][1])
    times, rows = Times([spans for spans, _ in seen], steps), []
    for (ours, theirs, backend), limit in WANTED.items():
        if ours in times.wall and theirs in times.wall:
            ratios = [times.ratio(ours, theirs, of) for of in ("wall", "cpu")]
            medians = [float(np.median(times.wall[name])) for name in (ours, theirs)]
            wanted = limit if backend in (None, contest.backend) else None
            rows.append(Row(contest.title, ours, theirs, *medians, *ratios, wanted))
    return rows


def print_rows(rows: Sequence[Row], console: Console) -> None:
    for title in dict.fromkeys(row.contest for row in rows):
        table = Table(title=title, title_justify="left")
        for column, how in (("minidist", "left"), ("beside", "left"), ("ms", "right"), ("ms of it", "right")):
            table.add_column(column, justify=how, no_wrap=True)
        for column in ("ratio [95 %]", "of CPU", "verdict"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in rows if row.contest == title):
            numbers = (f"{row.ours_s * 1e3:.1f}", f"{row.theirs_s * 1e3:.1f}", str(row.ratio), f"{row.cpu.median:.3f}")
            table.add_row(row.ours, row.theirs, *numbers, row.verdict)
        console.print(table)


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None, work: Workload | None = None) -> int:
    """Run the command; returns the exit code: 2 for a wrong request, 1 for a contender that computes wrongly.

    server: where the ranks come from; work: what is trained. One of its own when None.
    """
    parser = argparse.ArgumentParser("python -m bench model", description="one model on several ranks, in turns")
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="turns of every contender (default: %(default)s)")
    add("--steps", type=int, default=2, help="steps per turn (default: %(default)s)")
    add("--backend", choices=("gloo", "shm"), action="append", help="may be repeated (default: both)")
    add("--stages", type=int, action="append", help="of the pipelines, 0 for none, may be repeated (default: 2 and 4)")
    command.add_outputs(parser, "model", "json")
    options = parser.parse_args(arguments)
    console, work = command.console(), work or Workload()
    stages = [count for count in (options.stages if options.stages is not None else [2, 4]) if count]
    contests = [
        contest
        for backend in options.backend or ("gloo", "shm")
        for contest in (Contest(2, backend), *(Contest(count, backend, 2 * count) for count in stages))
    ]

    def run(server: RankServer) -> None:
        if options.rounds < 1 or options.steps < 1 or any(not 2 <= count <= 4 for count in stages):
            raise UserError(
                f"--rounds {options.rounds} --steps {options.steps} --stages {stages}: at least 1 round of 1 step, and "
                f"2 to 4 stages, as there are {work.global_batch} samples for twice as many micro-batches"
            )
        rows: list[Row] = []
        for contest in contests:
            rows += (found := compare(server, contest, work, options.rounds, options.steps))
            print_rows(found, console)
        facts = {"machine": machine_facts("gloo and shm"), "workload": workload_facts(work), "rounds": options.rounds}
        command.write(options.json, facts | {"rows": [asdict(row) | {"verdict": row.verdict} for row in rows]})
        console.print(f"figures in {options.json}", highlight=False, soft_wrap=True)

    return command.exit_code(run, server)
