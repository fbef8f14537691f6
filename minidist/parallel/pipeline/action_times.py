"""Start and end times of every operation of a schedule, given the duration of each kind of operation.

A stage runs its operations in order, each as soon as the stage is free and its inputs have arrived. A result arrives at
another stage `transfer_time` after it is computed, and transfers overlap with computation (Qi et al. 2023, appendix G,
equations 4 to 6). The executor uses only the order that unit times give; `minidist simulate` computes bubbles from
measured times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Op, Schedule, StageOp
from minidist.parallel.pipeline.check import topological_order


class Span(NamedTuple):
    """An operation with its start and end time."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class ActionTimes:
    """A schedule with the times of its operations. spans: for each stage, its operations in order."""

    schedule: Schedule
    spans: Sequence[Sequence[Span]]


def compute_spans(
    schedule: Schedule, durations: Mapping[str, Sequence[float]], transfer_time: float = 0.0
) -> list[list[Span]]:
    """Compute start and end of each stage's operations, in the unit of `durations`.

    durations: by kind of operation ("F", "B", "W"), one duration for each model chunk in pipeline order.
    transfer_time: between two stages. Raises UserError for a schedule that cannot run.
    """
    ends: dict[StageOp, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    for place in topological_order(schedule):
        stage, op = place
        start = spans[stage][-1].end if spans[stage] else 0.0
        for need in schedule.needs(stage, op):
            start = max(start, ends[need] + (transfer_time if need.stage != stage else 0.0))
        ends[place] = start + durations[op.kind][schedule.position(stage, op.chunk)]
        spans[stage].append(Span(op, start, ends[place]))
    return spans


def unit_times(schedule: Schedule) -> ActionTimes:
    """Return the schedule's times if F takes 1 and backward 2: B takes 2, or B and W take 1 each."""
    backward = 1.0 if schedule.splits_backward else 2.0
    durations = {kind: [time] * schedule.positions for kind, time in (("F", 1.0), ("B", backward), ("W", 1.0))}
    return ActionTimes(schedule, compute_spans(schedule, durations))
