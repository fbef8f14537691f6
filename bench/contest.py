"""Contenders that take turns on the same ranks: launch them, gather what they saw, work out the figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bench import memory, rounds
from bench.contenders import Contender, ContenderContext
from bench.facts import THREADS_PER_RANK
from bench.statistics import Interval, paired_interval, step_times
from bench.workload import Workload
from minidist.errors import RunError
from minidist.tools.launch import RankServer

FLOOR = "no communication"


class Entry(NamedTuple):
    """A contender. beside: the name of that of ours it is set beside, None for none."""

    make: Callable[[ContenderContext], Contender]
    beside: str | None = None


@dataclass(frozen=True)
class Row:
    """One contender in one run.

    step_s: seconds of a step in each round; over_floor: its time over that of the floor; ours: our time over its time
    (below 1: we are faster). cpu_s, ours_cpu: the same of the CPU time of all ranks, which a busy machine disturbs
    less. tensor_bytes, resident_bytes: peak of the rank that holds most.
    """

    name: str
    kernel: str
    agreement: float | None
    step_s: list[float]
    over_floor: Interval | None
    ours: Interval | None
    cpu_s: list[float]
    ours_cpu: Interval | None
    tensor_bytes: int | None
    resident_bytes: int | None

    @property
    def median_s(self) -> float:
        return float(np.median(self.step_s))


@dataclass(frozen=True)
class Run:
    """All contenders at one number of ranks in one mode."""

    ranks: int
    mode: str
    rows: list[Row]
    left_out: list[str] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


class Times:
    """What the ranks' clocks showed. steps: of a turn. wall, cpu: seconds of a step in each round, by contender."""

    def __init__(self, seen: Sequence[Mapping[str, Sequence[rounds.Span]]], steps: int):
        spans = {name: np.array([one[name] for one in seen]) for name in seen[0]}  # (ranks, rounds, 3)
        self.wall = {name: step_times(found) / steps for name, found in spans.items()}
        self.cpu = {name: found[:, :, 2].sum(axis=0) / steps for name, found in spans.items()}

    def ratio(self, above: str | None, below: str | None, of: str = "wall") -> Interval | None:
        """The one over the other; None where one is missing, or they are the same."""
        times = getattr(self, of)
        if above == below or above not in times or below not in times:
            return None
        return paired_interval(times[above], times[below])


def same_kernel(kernels: Mapping[str, str]) -> None:
    """Raise RunError unless all contenders have the same optimizer kernel."""
    if len(set(kernels.values())) > 1:
        raise RunError(f"the contenders run different optimizer kernels, which no ratio can see through: {kernels}")


def compare(
    server: RankServer,
    entries: Mapping[str, Entry],
    work: Workload,
    ranks: int,
    mode: str,
    n_rounds: int,
    steps: int,
    with_memory: bool = True,
    left_out: Sequence[str] = (),
) -> Run:
    """Time the contenders in turns and measure the memory of each alone. Raises RunError when one computes wrongly."""
    options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": "gloo"}
    makers = {name: entry.make for name, entry in entries.items()}
    seen = server.run(rounds.run, ranks, (makers, work, mode, n_rounds, steps), **options).values
    same_kernel(seen[0].kernels)
    times, rows = Times([turns.spans for turns in seen], steps), []
    for name, (make, beside) in entries.items():
        tensors = residents = None
        if with_memory:
            tensors = max(server.run(memory.tensor_peak, ranks, (make, work, mode), **options).values)
            grown = server.run(memory.resident_peak, ranks, (make, work, mode), **options).values
            residents = None if None in grown else max(grown)
        rows.append(
            Row(
                name,
                seen[0].kernels[name],
                seen[0].agreement.get(name),
                times.wall[name].tolist(),
                times.ratio(name, FLOOR),
                times.ratio(beside, name),
                times.cpu[name].tolist(),
                times.ratio(beside, name, of="cpu"),
                tensors,
                residents,
            )
        )
    return Run(ranks, mode, rows, list(left_out))
