"""Insert sends and receives between a stage's actions, in an order that cannot deadlock.

A send may block until its receive is posted (rendezvous). If every stage sent right after an action and received
right before the next, 1F1B would deadlock: stage s sends an activation while stage s + 1 sends a gradient. Here all
actions and transfers have one global order, derived from the times of the actions (`action_times`), and both
stages of a transfer have it at that place in their programs. The first pending transfer can then always complete.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import UserError
from minidist.parallel.pipeline.action_times import ActionTimes
from minidist.parallel.pipeline.actions import Action, Schedule, StageAction
from minidist.parallel.pipeline.check import topological_order


class Transfer(NamedTuple):
    """The send or the receive of one tensor between two stages.

    kind: "send" or "recv". peer: the other stage. result_of: the action whose result is transferred: of F the chunk's
    output, of B the gradient of the chunk's input.
    """

    kind: str
    peer: int
    result_of: StageAction

    def __str__(self) -> str:
        return f"{self.kind} {self.result_of.action} {'to' if self.kind == 'send' else 'from'} stage {self.peer}"


StageProgram = Sequence[Action | Transfer]


def insert_transfers(times: ActionTimes) -> list[list[Action | Transfer]]:
    """Return each stage's program: its actions in order, with the sends and receives between them.

    times: the schedule, with the times of its actions, which decide where a transfer is placed.
    The programs do not deadlock even if every transfer blocks until its peer arrives (`check_rendezvous`). With
    asynchronous transfers a stage posts each at its place and waits where it needs the tensor.
    """
    schedule = times.schedule
    programs: list[list[Action | Transfer]] = [[] for _ in range(schedule.stages)]
    position = {place: number for number, place in enumerate(topological_order(schedule))}
    # Actions are ordered by their start, transfers by the end of the action whose result they carry.
    events: list[tuple[float, int, int, StageAction]] = []
    for stage, spans in enumerate(times.spans):
        for span in spans:
            place = StageAction(stage, span.action)
            events += [(span.start, position[place], 0, place), (span.end, position[place], 1, place)]
    for _, _, is_end, place in sorted(events):
        if not is_end:
            programs[place.stage].append(place.action)
        elif (consumer := schedule.consumer(*place)) and consumer.stage != place.stage:
            programs[place.stage].append(Transfer("send", consumer.stage, place))
            programs[consumer.stage].append(Transfer("recv", place.stage, place))
    return programs


def check_rendezvous(schedule: Schedule, programs: Sequence[StageProgram]) -> None:
    """Check that the programs finish even if each send and receive blocks until the other is posted.

    programs: for each stage, its actions and transfers in order (`insert_transfers`). Raises UserError if stages
    deadlock, or if a stage uses or sends a tensor that it does not have.
    """
    at = [0] * len(programs)
    have: list[set[StageAction]] = [set() for _ in programs]
    awake = list(range(len(programs)))
    while awake:
        stage = awake.pop()
        while at[stage] < len(programs[stage]):
            step = programs[stage][at[stage]]
            if isinstance(step, Transfer):
                peer = _matched(programs, at, stage, step)
                if peer is None:
                    break
                sender = step.result_of.stage
                _check_has(have[sender], sender, step.result_of, "sends it")
                have[peer if sender == stage else stage].add(step.result_of)
                at[peer] += 1
                awake.append(peer)
            else:
                for need in schedule.dependencies(stage, step):
                    _check_has(have[stage], stage, need, f"runs {step}")
                have[stage].add(StageAction(stage, step))
            at[stage] += 1
    if stuck := [stage for stage, program in enumerate(programs) if at[stage] < len(program)]:
        waits = "; ".join(f"stage {stage} waits in {programs[stage][at[stage]]}" for stage in stuck)
        raise UserError(
            f"the transfers deadlock: {waits}. Give both ends of each a place in one order: insert_transfers."
        )


def _matched(programs: Sequence[StageProgram], at: Sequence[int], stage: int, step: Transfer) -> int | None:
    """Return the peer if the other end of this transfer is its next step, else None."""
    program, index = programs[step.peer], at[step.peer]
    other = Transfer("recv" if step.kind == "send" else "send", stage, step.result_of)
    return step.peer if index < len(program) and program[index] == other else None


def _check_has(have: set[StageAction], stage: int, need: StageAction, what: str) -> None:
    if need not in have:
        how = "run" if need.stage == stage else "received"
        raise UserError(f"stage {stage} {what} before it has {how} {need}: put that first.")
