"""Compare contenders on fresh ranks: launch their timing and memory runs, and compute paired ratios."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bench import peak_memory, time_contenders
from bench.bootstrap import ConfidenceInterval, paired_interval, slowest_rank_times
from bench.contenders import NO_COMMUNICATION, Contender, ContenderContext
from bench.environment import THREADS_PER_RANK
from bench.workload import Workload
from minidist.errors import RunError
from minidist.tools.launch import RankServer


class ContenderSpec(NamedTuple):
    """How to build a contender, and the minidist contender to compare it with; None for no comparison."""

    make: Callable[[ContenderContext], Contender]
    compared_with: str | None = None


@dataclass(frozen=True)
class ContenderResult:
    """Measurements of one contender.

    step_s, cpu_s: wall time and CPU time of all ranks per training step, in seconds, one value per round; a busy
    machine disturbs CPU time less. time_over_no_communication: ratio of its wall time to training without
    communication. minidist_ratio, minidist_cpu_ratio: minidist's time over this contender's time; below 1, minidist is
    faster. tensor_bytes, resident_bytes: peak of the rank with the highest peak; None if not measured.
    """

    name: str
    kernel: str
    max_relative_error: float | None
    step_s: list[float]
    time_over_no_communication: ConfidenceInterval | None
    minidist_ratio: ConfidenceInterval | None
    cpu_s: list[float]
    minidist_cpu_ratio: ConfidenceInterval | None
    tensor_bytes: int | None
    resident_bytes: int | None

    @property
    def median_s(self) -> float:
        """Median wall time of a training step over the rounds, in seconds."""
        return float(np.median(self.step_s))


@dataclass(frozen=True)
class Comparison:
    """Results of all contenders on one number of ranks, in one mode. left_out: why contenders could not run."""

    ranks: int
    mode: str
    results: list[ContenderResult]
    left_out: list[str] = field(default_factory=list)

    def result(self, name: str) -> ContenderResult | None:
        """Return one contender's result; None if that contender did not run."""
        return next((result for result in self.results if result.name == name), None)


class StepTimes:
    """Wall and CPU seconds per training step in each round, by contender, from the timings of all ranks.

    rank_timings: one mapping per rank. steps: training steps per turn.
    """

    def __init__(self, rank_timings: Sequence[Mapping[str, Sequence[time_contenders.TurnTiming]]], steps: int):
        # by contender: (ranks, rounds, 3)
        stacked = {name: np.array([timings[name] for timings in rank_timings]) for name in rank_timings[0]}
        self.wall = {name: slowest_rank_times(timings) / steps for name, timings in stacked.items()}
        self.cpu = {name: timings[:, :, 2].sum(axis=0) / steps for name, timings in stacked.items()}

    def ratio(self, numerator: str | None, denominator: str | None, clock: str = "wall") -> ConfidenceInterval | None:
        """Return the paired ratio of two contenders' times; None if one did not run or both are the same.

        clock: "wall" or "cpu".
        """
        times = getattr(self, clock)
        if numerator == denominator or numerator not in times or denominator not in times:
            return None
        return paired_interval(times[numerator], times[denominator])


def require_same_kernel(kernels: Mapping[str, str]) -> None:
    """Raise RunError unless all contenders run the same optimizer kernel."""
    if len(set(kernels.values())) > 1:
        raise RunError(f"the contenders run different optimizer kernels, so their times do not compare: {kernels}")


def compare_contenders(
    server: RankServer,
    specs: Mapping[str, ContenderSpec],
    work: Workload,
    ranks: int,
    mode: str,
    rounds: int,
    steps: int,
    with_memory: bool = True,
    left_out: Sequence[str] = (),
) -> Comparison:
    """Time the contenders in turns, then measure the memory of each alone. Raises RunError if one computes wrongly.

    specs: the contenders, by name. ranks: the number of ranks. mode: "full" or "bare" (see `contenders`). rounds: how
    many turns each contender has, of `steps` training steps each. left_out: why contenders could not run, for the
    report.
    """
    launch_options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0, "backend": "gloo"}
    makers = {name: spec.make for name, spec in specs.items()}
    arguments = (makers, work, mode, rounds, steps)
    by_rank = server.run(time_contenders.check_and_time, ranks, arguments, **launch_options).values
    require_same_kernel(by_rank[0].kernels)
    times, results = StepTimes([timings.timings for timings in by_rank], steps), []
    for name, (make, compared_with) in specs.items():
        tensor_bytes = resident_bytes = None
        if with_memory:
            arguments = (make, work, mode)
            tensor_bytes = max(server.run(peak_memory.measure_tensor_peak, ranks, arguments, **launch_options).values)
            growth = server.run(peak_memory.measure_resident_growth, ranks, arguments, **launch_options).values
            resident_bytes = None if None in growth else max(growth)
        results.append(
            ContenderResult(
                name,
                by_rank[0].kernels[name],
                by_rank[0].max_relative_errors.get(name),
                times.wall[name].tolist(),
                times.ratio(name, NO_COMMUNICATION),
                times.ratio(compared_with, name),
                times.cpu[name].tolist(),
                times.ratio(compared_with, name, clock="cpu"),
                tensor_bytes,
                resident_bytes,
            )
        )
    return Comparison(ranks, mode, results, list(left_out))
