"""Sends and receives between a stage's operations, so that a pipeline cannot deadlock on them.

A send may last until it is matched (a rendezvous). If every stage sent right after an operation and received right
before the next, 1F1B would deadlock: stage s sends an activation on while stage s + 1 sends a gradient back. Here every
transfer has one place in a single order of all actions and transfers, derived from the times of the actions
(`action_times`), and both of its ends stand at that place in their stages' programs. The first transfer that has not
happened can then always happen.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import UserError
from minidist.parallel.pipeline.action_times import ActionTimes
from minidist.parallel.pipeline.actions import Op, Schedule, StageOp
from minidist.parallel.pipeline.check import topological_order


class Transfer(NamedTuple):
    """One end of a transfer: `send` or `recv`, the stage at the other end, and the operation whose result it carries.

    After F that is the chunk's output, after B the gradient of its input; `Schedule.feeds` says what needs it.
    """

    kind: str
    peer: int
    result_of: StageOp

    def __str__(self) -> str:
        return f"{self.kind} {self.result_of.op} {'to' if self.kind == 'send' else 'from'} stage {self.peer}"


StageProgram = Sequence[Op | Transfer]


def insert_transfers(times: ActionTimes) -> list[list[Op | Transfer]]:
    """Return the program of every stage: its operations in order, with the sends and receives between them.

    `check_rendezvous` proves the result free of deadlock even if every transfer blocks until its peer is there. A stage
    with asynchronous transfers posts each where the program has it and waits where it needs the tensor.
    """
    schedule = times.schedule
    programs: list[list[Op | Transfer]] = [[] for _ in range(schedule.stages)]
    rank = {place: number for number, place in enumerate(topological_order(schedule))}
    # An operation counts from its start, a transfer from the end of the operation whose result it carries.
    events: list[tuple[float, int, int, StageOp]] = []
    for stage, spans in enumerate(times.spans):
        for span in spans:
            place = StageOp(stage, span.op)
            events += [(span.start, rank[place], 0, place), (span.end, rank[place], 1, place)]
    for _, _, is_end, place in sorted(events):
        if not is_end:
            programs[place.stage].append(place.op)
        elif (goes_to := schedule.feeds(*place)) and goes_to.stage != place.stage:
            programs[place.stage].append(Transfer("send", goes_to.stage, place))
            programs[goes_to.stage].append(Transfer("recv", place.stage, place))
    return programs


def check_rendezvous(schedule: Schedule, programs: Sequence[StageProgram]) -> None:
    """Prove that programs end when a send ends only once its receive has begun, and the other way round.

    Raises UserError when stages wait for each other, and when one uses or sends what it does not have.
    """
    at = [0] * len(programs)
    have: list[set[StageOp]] = [set() for _ in programs]
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
                for need in schedule.needs(stage, step):
                    _check_has(have[stage], stage, need, f"runs {step}")
                have[stage].add(StageOp(stage, step))
            at[stage] += 1
    if stuck := [stage for stage, program in enumerate(programs) if at[stage] < len(program)]:
        waits = "; ".join(f"stage {stage} waits in {programs[stage][at[stage]]}" for stage in stuck)
        raise UserError(
            f"the transfers deadlock: {waits}. Give both ends of each a place in one order: insert_transfers."
        )


def _matched(programs: Sequence[StageProgram], at: Sequence[int], stage: int, step: Transfer) -> int | None:
    """The peer, if it stands at the other end of this very transfer."""
    program, index = programs[step.peer], at[step.peer]
    other = Transfer("recv" if step.kind == "send" else "send", stage, step.result_of)
    return step.peer if index < len(program) and program[index] == other else None


def _check_has(have: set[StageOp], stage: int, need: StageOp, what: str) -> None:
    if need not in have:
        how = "run" if need.stage == stage else "received"
        raise UserError(f"stage {stage} {what} before it has {how} {need}: put that first.")
