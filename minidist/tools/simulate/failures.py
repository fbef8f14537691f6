"""One simulated run on machines that fail: when it works, saves, loses work and restarts."""

import random
from typing import NamedTuple

from minidist.tools.estimate.goodput import FailureModel

USEFUL, SAVING, LOST, RESTART = "useful work", "saving", "lost work", "restart"


class Phase(NamedTuple):
    """An activity of a run or a rank from time `start` to time `stop`, in seconds. kind: such as "saving"."""

    kind: str
    start: float
    stop: float


def simulate_run_with_failures(
    model: FailureModel, interval_s: float, num_intervals: int, seed: int = 0
) -> list[Phase]:
    """Simulate a run that saves checkpoints and fails at random; return its phases in order.

    The run ends when `num_intervals` intervals of `interval_s` seconds of work are saved. model: mean time between
    failures, and the durations of a save and a restart. Failures are a Poisson process, drawn from `seed`: they occur
    during work, saves and restarts, and lose all work since the last save. The time of a save that a failure interrupts
    counts as lost work.
    """
    draw = random.Random(seed)
    now, failure, phases = 0.0, draw.expovariate(1 / model.mtbf_s), []
    for _ in range(num_intervals):
        while failure < now + interval_s + model.save_s:
            phases.append(Phase(LOST, now, failure))
            now = failure
            failure += draw.expovariate(1 / model.mtbf_s)
            while failure < now + model.restart_s:  # a restart that fails begins again
                phases.append(Phase(RESTART, now, failure))
                now = failure
                failure += draw.expovariate(1 / model.mtbf_s)
            phases.append(Phase(RESTART, now, now + model.restart_s))
            now += model.restart_s
        phases += [
            Phase(USEFUL, now, now + interval_s),
            Phase(SAVING, now + interval_s, now + interval_s + model.save_s),
        ]
        now += interval_s + model.save_s
    return phases


def time_by_kind(phases: list[Phase]) -> dict[str, float]:
    """Return the total seconds of the phases of each kind, by kind, in order of first occurrence."""
    seconds: dict[str, float] = {}
    for phase in phases:
        seconds[phase.kind] = seconds.get(phase.kind, 0.0) + phase.stop - phase.start
    return seconds
