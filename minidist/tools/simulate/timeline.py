"""The simulated timeline of a pipeline schedule: step time, bubble and peak micro-batches in flight.

`parallel.pipeline.action_times` computes the start and end of every action; this module validates the stage times that
it needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.errors import UserError
from minidist.parallel.pipeline.action_times import ActionTimes, compute_spans
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.check import peak_live_micro_batches


@dataclass(frozen=True)
class StageTimes:
    """The times of a stage's forward (F), input gradient (B) and weight gradient (W) per micro-batch, in any unit.

    f, b, w: one number for all stages; or one per stage, for all of its chunks together; or one per model chunk, in the
    order of forward. A backward that is not split takes b + w. comm: from the end of an action on one stage until its
    result has arrived at another.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    comm: float = 0.0

    def action_durations(self, schedule: Schedule) -> dict[str, list[float]]:
        """The duration of each kind of action, per model chunk. Raises UserError for invalid times and for a number of
        them that does not fit the schedule."""
        if not _is_time(self.comm):
            raise UserError(f"t-comm is {self.comm}; it must be 0 or more.")
        by = {kind: self._by_position(kind, schedule) for kind in "fbw"}
        whole = [b + w for b, w in zip(by["b"], by["w"], strict=True)]
        once = sum(by["f"]) + sum(whole)
        if not once:
            raise UserError("t-f, t-b and t-w are all 0, so nothing takes time: give one of them a time above 0.")
        if math.isinf((once + 2 * schedule.positions * self.comm) * schedule.micro_batches):
            raise UserError("the times add up to more than a number can hold: give all of them in a larger unit.")
        return {"F": by["f"], "B": by["b"] if schedule.splits_backward else whole, "W": by["w"]}

    def _by_position(self, kind: str, schedule: Schedule) -> list[float]:
        given = getattr(self, kind)
        times = list(given) if isinstance(given, Sequence) else [given]
        if wrong := [time for time in times if not _is_time(time)]:
            raise UserError(f"t-{kind} is {wrong[0]}; a time is a number, 0 or more.")
        if len(times) == schedule.positions:
            return times
        if len(times) not in (1, schedule.stages):
            parts = f", or {schedule.positions} for its parts" if schedule.chunks > 1 else ""
            raise UserError(
                f"t-{kind} has {len(times)} times for {schedule.stages} stages: give 1 for all of them, or "
                f"{schedule.stages}{parts}."
            )
        owners = [schedule.owner(position)[0] for position in range(schedule.positions)]
        return [times[stage if len(times) > 1 else 0] / schedule.chunks for stage in owners]


@dataclass(frozen=True)
class PipelineTimeline(ActionTimes):
    """A schedule with the times of its actions, and its step time, bubble and peak micro-batches in flight."""

    @property
    def total(self) -> float:
        """The time of a step: the longest time of any stage from its first action to its last.

        Steps follow each other, so a stage that starts late may end late (Qi et al. 2023, section 5.3 and equation 3).
        """
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def makespan(self) -> float:
        """The time from the first action of any stage to the last of any: the time of a single step by itself."""
        return max(spans[-1].end for spans in self.spans) - min(spans[0].start for spans in self.spans)

    @property
    def busy(self) -> list[float]:
        """The compute time of every stage."""
        return [math.fsum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble(self) -> float:
        """The fraction of `total` in which a stage is idle, averaged over the stages."""
        return max(0.0, 1 - math.fsum(self.busy) / (len(self.spans) * self.total))

    @property
    def peak_live(self) -> list[int]:
        """The peak number of micro-batches in flight on every stage, as `check.peak_live` counts them."""
        return peak_live_micro_batches(self.schedule)


def simulate_schedule(schedule: Schedule, times: StageTimes) -> PipelineTimeline:
    """Simulate a schedule. Raises UserError if it cannot run, and for invalid times."""
    return PipelineTimeline(schedule, compute_spans(schedule, times.action_durations(schedule), times.comm))


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0
