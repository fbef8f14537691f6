"""Insert sends and receives between a stage's actions, in an order that cannot deadlock.

A send may block until its receive is posted (rendezvous). If every stage sent right after an action and received
right before the next, 1F1B would deadlock: stage s sends an activation while stage s + 1 sends a gradient. Here all
actions and transfers have one global order, derived from the times of the actions, and both stages of a transfer have
it at that place in their programs. The first pending transfer can then always complete.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Action, Schedule, StageAction, find_order_and_deadlocks


class Span(NamedTuple):
    """An action with its start and end time, in the unit of the durations given to `compute_spans`."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """The send or the receive of one tensor between two stages.

    kind: "send" or "recv". peer: the other stage. result_of: the action whose result is transferred: for F the chunk's
    output, for B the gradient of the chunk's input.
    """

    kind: str
    peer: int
    result_of: StageAction

    def __str__(self) -> str:
        return f"{self.kind} {self.result_of.action} {'to' if self.kind == 'send' else 'from'} stage {self.peer}"


StageProgram = Sequence[Action | Transfer]


def compute_spans(
    schedule: Schedule, durations: Mapping[str, Sequence[float]], transfer_time: float = 0.0
) -> list[list[Span]]:
    """Compute start and end of each stage's actions, in the unit of `durations`.

    durations: by kind of action ("F", "B", "W"), one duration for each model chunk in pipeline order. transfer_time:
    the time to send a result to another stage. Returns a list for each stage, in execution order. A stage runs its
    actions in order, each as soon as the stage is free and its inputs have arrived; transfers overlap with computation
    (Qi et al. 2023, appendix G, equations 4 to 6). Raises ValueError for a schedule that deadlocks.
    """
    order, stuck = find_order_and_deadlocks(schedule)
    if stuck:
        raise ValueError(f"schedule {schedule.kind} deadlocks: stages {sorted(stuck)} wait for each other")
    ends: dict[StageAction, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.num_stages)]
    for place in order:
        stage, action = place
        start = spans[stage][-1].end if spans[stage] else 0.0
        for need in schedule.dependencies(stage, action):
            start = max(start, ends[need] + (transfer_time if need.stage != stage else 0.0))
        ends[place] = start + durations[action.kind][schedule.position(stage, action.chunk)]
        spans[stage].append(Span(action, start, ends[place]))
    return spans


def build_stage_programs(schedule: Schedule) -> list[list[Action | Transfer]]:
    """Return each stage's actions and transfers in order, planned for durations 1 (F) and 2 (full backward)."""
    backward = 1.0 if schedule.splits_backward else 2.0
    durations = {kind: [time] * schedule.num_parts for kind, time in (("F", 1.0), ("B", backward), ("W", 1.0))}
    return insert_transfers(schedule, compute_spans(schedule, durations))


def insert_transfers(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> list[list[Action | Transfer]]:
    """Return each stage's program: its actions in order, with the sends and receives between them.

    spans: the times of the actions (`compute_spans`), which determine the place of each transfer. The programs do not
    deadlock even if every transfer blocks until its peer arrives. With asynchronous transfers a stage posts each at its
    place and waits where it needs the tensor.
    """
    programs: list[list[Action | Transfer]] = [[] for _ in range(schedule.num_stages)]
    position = {place: number for number, place in enumerate(find_order_and_deadlocks(schedule)[0])}
    # Actions are ordered by their start, transfers by the end of the action whose result they carry.
    events: list[tuple[float, int, int, StageAction]] = []
    for stage, of_stage in enumerate(spans):
        for span in of_stage:
            place = StageAction(stage, span.action)
            events += [(span.start, position[place], 0, place), (span.end, position[place], 1, place)]
    for _, _, is_end, place in sorted(events):
        if not is_end:
            programs[place.stage].append(place.action)
        elif (consumer := schedule.consumer(*place)) and consumer.stage != place.stage:
            programs[place.stage].append(Transfer("send", consumer.stage, place))
            programs[consumer.stage].append(Transfer("recv", place.stage, place))
    return programs
