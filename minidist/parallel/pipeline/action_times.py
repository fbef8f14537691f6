"""Start and end of every action of a schedule, given how long each kind of action takes.

A stage runs its actions in their order, each as soon as the stage is free and its inputs are there. The result of
another stage arrives `transfer_time` after that stage has computed it, while both stages compute (Qi et al. 2023,
appendix G, equations 4 to 6). The executor needs only the order that follows from unit times; `minidist simulate`
computes bubbles from the same function with measured times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Op, Schedule, StageOp
from minidist.parallel.pipeline.check import topological_order


class Span(NamedTuple):
    """One action with its start and its end."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class ActionTimes:
    """A schedule with the times of its actions. spans: for every stage its actions, in order."""

    schedule: Schedule
    spans: Sequence[Sequence[Span]]


def compute_spans(
    schedule: Schedule, durations: Mapping[str, Sequence[float]], transfer_time: float = 0.0
) -> list[list[Span]]:
    """Return for every stage its actions with start and end.

    durations: by kind of action ("F", "B", "W"), one duration for each part of the model.
    Raises UserError for a schedule that cannot run.
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
    """Return the times of a schedule in which a forward takes 1 and a whole backward 2, half of it for the weights."""
    backward = 1.0 if schedule.splits_backward else 2.0
    durations = {kind: [time] * schedule.positions for kind, time in (("F", 1.0), ("B", backward), ("W", 1.0))}
    return ActionTimes(schedule, compute_spans(schedule, durations))
