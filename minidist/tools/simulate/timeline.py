"""When every operation of a schedule begins and ends, and how much of the pipeline's time nobody works.

`parallel.pipeline.action_times` computes start and end of every operation; this module validates the given times and
derives step time, bubble and peak activations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.errors import UserError
from minidist.parallel.pipeline.action_times import ActionTimes, compute_spans
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.check import peak_live


@dataclass(frozen=True)
class Times:
    """How long a stage's forward, input-gradient half and weight half take for a micro-batch, in any unit of time.

    f, b, w: one number for all stages; or one per stage; or, with several chunks, one per part of the model, from the
    input on. A number per stage is for all of its chunks together. A whole backward takes b + w. comm: from the end of
    an operation on one stage until its result has arrived at another.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    comm: float = 0.0

    def of(self, schedule: Schedule) -> dict[str, list[float]]:
        """Times of the operations by kind, for each part of the model. Raises UserError when there are too few."""
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
class Timeline(ActionTimes):
    """A schedule with the times of its operations, and what follows from them: step time, bubble, peak activations."""

    @property
    def total(self) -> float:
        """What a step costs: the longest that a stage takes from its own first operation to its own last.

        Steps follow each other, so a stage that began late may end late (Qi et al. 2023, section 5.3 and equation 3).
        """
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def makespan(self) -> float:
        """From the first operation of any stage to the last of any: what one step alone takes."""
        return max(spans[-1].end for spans in self.spans) - min(spans[0].start for spans in self.spans)

    @property
    def busy(self) -> list[float]:
        """For every stage the time it computes."""
        return [math.fsum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble(self) -> float:
        """The share of `total` in which a stage has nothing to do, on average over the stages."""
        return max(0.0, 1 - math.fsum(self.busy) / (len(self.spans) * self.total))

    @property
    def peak_live(self) -> list[int]:
        """For every stage the most micro-batches alive, as `check.peak_live` counts them."""
        return peak_live(self.schedule)


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """The timeline of a schedule. Raises UserError for one that cannot run, and for times that cannot be."""
    return Timeline(schedule, compute_spans(schedule, times.of(schedule), times.comm))


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0
