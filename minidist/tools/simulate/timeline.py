"""The simulated timeline of a pipeline schedule: step time, bubble and peak micro-batches in flight.

`parallel.pipeline.transfers` computes the start and end of every action; this module validates the stage times that it
needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.transfers import Span, compute_spans
from minidist.tools.simulate.check import check_schedule, peak_live_micro_batches


@dataclass(frozen=True)
class StageTimes:
    """The durations of forward (F), input gradient (B) and weight gradient (W) of one micro-batch, in any unit.

    f, b, w: each is one number for all stages; or one per stage, for all of its chunks together; or one per model
    chunk, in the order of forward. A backward that is not split takes b + w. comm: the time from the end of an action
    on one stage until its result has arrived at another stage.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    comm: float = 0.0

    def action_durations(self, schedule: Schedule) -> dict[str, list[float]]:
        """Return the duration of each action of one micro-batch: {"F", "B" or "W": one duration per model chunk}.

        Durations have the unit of the fields. Model chunks are in the order of forward; "B" is the whole backward if
        the schedule does not split it. Raises UserError for invalid times, and for a field that is a list of neither
        one time per stage nor one per chunk.
        """
        if not _is_valid_duration(self.comm):
            raise UserError(f"t-comm is {self.comm}; it must be 0 or more.")
        by = {kind: self._durations_by_chunk(kind, schedule) for kind in "fbw"}
        full_backward = [b + w for b, w in zip(by["b"], by["w"], strict=True)]
        total = sum(by["f"]) + sum(full_backward)
        if not total:
            raise UserError("t-f, t-b and t-w are all 0: give one of them a time above 0.")
        if math.isinf((total + 2 * schedule.num_parts * self.comm) * schedule.micro_batches):
            raise UserError("the sum of all times overflows: give the times in a larger unit.")
        return {"F": by["f"], "B": by["b"] if schedule.splits_backward else full_backward, "W": by["w"]}

    def _durations_by_chunk(self, kind: str, schedule: Schedule) -> list[float]:
        """Return the duration of an action of this kind ("f", "b" or "w") for each model chunk."""
        value = getattr(self, kind)
        times = list(value) if isinstance(value, Sequence) else [value]
        if invalid := [time for time in times if not _is_valid_duration(time)]:
            raise UserError(f"t-{kind} is {invalid[0]}; a time is a number, 0 or more.")
        if len(times) == schedule.num_parts:
            return times
        if len(times) not in (1, schedule.num_stages):
            per_chunk = f", or {schedule.num_parts} for the model chunks" if schedule.num_chunks > 1 else ""
            raise UserError(
                f"t-{kind} has {len(times)} times for {schedule.num_stages} stages: give 1 for all of them, or "
                f"{schedule.num_stages}{per_chunk}."
            )
        owners = [schedule.owner(position)[0] for position in range(schedule.num_parts)]
        return [times[stage if len(times) > 1 else 0] / schedule.num_chunks for stage in owners]


@dataclass(frozen=True)
class PipelineTimeline:
    """The start and end of every action of a pipeline schedule; computes step time, bubble and in-flight micro-batches.

    spans: for each stage, its actions in order, with start and end. All times are in the unit of the `StageTimes`.
    """

    schedule: Schedule
    spans: Sequence[Sequence[Span]]

    @property
    def steady_step_time(self) -> float:
        """The time per step when many steps follow each other: the longest time of a stage from first to last action.

        A stage that starts late may end late, while other stages begin the next step (Qi et al. 2023, section 5.3 and
        equation 3).
        """
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def makespan(self) -> float:
        """The time of a single step: from the start of the first action of any stage to the end of the last action."""
        return max(spans[-1].end for spans in self.spans) - min(spans[0].start for spans in self.spans)

    @property
    def busy_times(self) -> list[float]:
        """The time that each stage spends on forward and backward, without idle time, in stage order."""
        return [math.fsum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble(self) -> float:
        """The fraction of `steady_step_time` in which a stage is idle, averaged over the stages."""
        return max(0.0, 1 - math.fsum(self.busy_times) / (len(self.spans) * self.steady_step_time))

    @property
    def peak_live_micro_batches(self) -> list[int]:
        """The peak number of in-flight micro-batches of each stage, in stage order (see
        `check.peak_live_micro_batches`)."""
        return peak_live_micro_batches(self.schedule)


def simulate_schedule(schedule: Schedule, times: StageTimes) -> PipelineTimeline:
    """Compute when every action of a pipeline schedule starts and ends, given the durations of actions and transfers.

    Raises UserError if the schedule cannot run (its actions wait for each other in a cycle), and for invalid times.
    """
    check_schedule(schedule)
    return PipelineTimeline(schedule, compute_spans(schedule, times.action_durations(schedule), times.comm))


def _is_valid_duration(value: float) -> bool:
    """Return whether the value is finite and at least 0."""
    return math.isfinite(value) and value >= 0
