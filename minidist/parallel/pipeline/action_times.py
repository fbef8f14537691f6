"""Start and end times of every action of a schedule, given the duration of each kind of action.

A stage runs its actions in order, each as soon as the stage is free and its inputs have arrived. A result arrives at
another stage `transfer_time` after it is computed, and transfers overlap with computation (Qi et al. 2023, appendix G,
equations 4 to 6). The executor uses only the order that unit times give; `minidist simulate` computes bubbles from
measured times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Action, Schedule, StageAction
from minidist.parallel.pipeline.check import topological_order


class Span(NamedTuple):
    """An action with its start and end time, in the unit of the given durations."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ActionTimes:
    """A schedule with the times of its actions. spans: for each stage, its actions in order."""

    schedule: Schedule
    spans: Sequence[Sequence[Span]]


def compute_spans(
    schedule: Schedule, durations: Mapping[str, Sequence[float]], transfer_time: float = 0.0
) -> list[list[Span]]:
    """Compute start and end of each stage's actions, in the unit of `durations`.

    durations: by kind of action ("F", "B", "W"), one duration for each model chunk in pipeline order. transfer_time:
    time that a result takes from one stage to another. Returns a list for each stage, in execution order. Raises
    UserError for a schedule that cannot run.
    """
    ends: dict[StageAction, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    for place in topological_order(schedule):
        stage, action = place
        start = spans[stage][-1].end if spans[stage] else 0.0
        for need in schedule.dependencies(stage, action):
            start = max(start, ends[need] + (transfer_time if need.stage != stage else 0.0))
        ends[place] = start + durations[action.kind][schedule.position(stage, action.chunk)]
        spans[stage].append(Span(action, start, ends[place]))
    return spans


def unit_times(schedule: Schedule) -> ActionTimes:
    """Return the schedule's times if a forward takes 1 and a backward 2: B takes 2, or B and W take 1 each."""
    backward = 1.0 if schedule.splits_backward else 2.0
    durations = {kind: [time] * schedule.positions for kind, time in (("F", 1.0), ("B", backward), ("W", 1.0))}
    return ActionTimes(schedule, compute_spans(schedule, durations))
