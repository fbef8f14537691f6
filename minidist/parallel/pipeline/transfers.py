"""Insert sends and receives between a stage's operations, in an order that cannot deadlock.

A send may block until its receive is posted (rendezvous). If every stage sent right after an operation and received
right before the next, 1F1B would deadlock: stage s sends an activation while stage s + 1 sends a gradient. Here all
operations and transfers have one global order, derived from the times of the operations (`action_times`), and both
stages of a transfer have it at that place in their programs. The first pending transfer can then always complete.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import UserError
from minidist.parallel.pipeline.action_times import ActionTimes
from minidist.parallel.pipeline.actions import Op, Schedule, StageOp
from minidist.parallel.pipeline.check import topological_order


class Transfer(NamedTuple):
    """One end of a transfer: `send` or `recv`, the peer stage, and the operation whose result is transferred.

    The result of F is the chunk's output, that of B the gradient of its input.
    """

    kind: str
    peer: int
    result_of: StageOp

    def __str__(self) -> str:
        return f"{self.kind} {self.result_of.op} {'to' if self.kind == 'send' else 'from'} stage {self.peer}"


StageProgram = Sequence[Op | Transfer]


def insert_transfers(times: ActionTimes) -> list[list[Op | Transfer]]:
    """Return each stage's program: its operations in order, with the sends and receives between them.

    The programs do not deadlock even if every transfer blocks until its peer arrives (`check_rendezvous`). With
    asynchronous transfers a stage posts each at its place and waits where it needs the tensor.
    """
    schedule = times.schedule
    programs: list[list[Op | Transfer]] = [[] for _ in range(schedule.stages)]
    rank = {place: number for number, place in enumerate(topological_order(schedule))}
    # Operations are ordered by their start, transfers by the end of the operation whose result they carry.
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
    """Check that the programs finish even if each send and receive blocks until the other is posted.

    Raises UserError if stages deadlock, or if a stage uses or sends a tensor that it does not have.
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
    """Return the peer if the other end of this transfer is its next step, else None."""
    program, index = programs[step.peer], at[step.peer]
    other = Transfer("recv" if step.kind == "send" else "send", stage, step.result_of)
    return step.peer if index < len(program) and program[index] == other else None


def _check_has(have: set[StageOp], stage: int, need: StageOp, what: str) -> None:
    if need not in have:
        how = "run" if need.stage == stage else "received"
        raise UserError(f"stage {stage} {what} before it has {how} {need}: put that first.")
