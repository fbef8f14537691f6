"""Check a schedule before it runs: completeness, deadlocks, and in-flight micro-batches.

Schedules written by hand fail in three ways: an operation is missing or duplicated, so that a gradient is wrong or an
activation is never freed; stages wait for each other forever; or the schedule needs too much memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Op, Schedule, StageOp, execution_order

_BEFORE = {"B": "F", "W": "B"}


def check_schedule(schedule: Schedule) -> list[int]:
    """Check that each stage runs every operation exactly once, and that the schedule cannot deadlock.

    Returns `peak_live_micro_batches`. Raises UserError, with the stages, the operations and, if there is one, a single
    change that repairs the schedule.
    """
    topological_order(schedule)
    return peak_live_micro_batches(schedule)


def topological_order(schedule: Schedule) -> list[StageOp]:
    """Return all operations, each after those that it needs. Raises UserError as `check_schedule` does."""
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
    places, stuck = execution_order(schedule)
    if stuck:
        raise UserError(_deadlock(schedule, places, stuck))
    return places


def peak_live_micro_batches(schedule: Schedule) -> list[int]:
    """Return each stage's peak number of in-flight micro-batches; those in different chunks count separately.

    A micro-batch is in flight from the start of its F to the end of its last backward operation (W if backward is
    split, else B). The count depends only on the order of operations. With c chunks on a stage, c in-flight chunks hold
    as many activations as one micro-batch through the whole stage.
    """
    return [max(live_micro_batches(schedule, stage), default=0) for stage in range(schedule.stages)]


def live_micro_batches(schedule: Schedule, stage: int) -> list[int]:
    """Return the number of in-flight micro-batches during each operation of a stage."""
    ends, order = schedule.last_kind, schedule.orders[stage]
    held = accumulate((op.kind == "F") - (op.kind == ends) for op in order)
    return [count + (op.kind == ends) for count, op in zip(held, order, strict=True)]


def _check_complete(schedule: Schedule, stage: int) -> None:
    """Raise UserError unless the stage has every required operation exactly once, and no other."""
    order = schedule.orders[stage]
    kinds = "FBW" if schedule.splits_backward else "FB"
    # A generator: a schedule with F0 and F999999999 must not build a huge set.
    due = (Op(k, m, c) for m in range(schedule.micro_batches) for c in range(schedule.chunks) for k in kinds)
    size = schedule.micro_batches * schedule.chunks * len(kinds)
    count = Counter(order)
    strange = [op for op in order if not _exists(op, schedule, kinds)]
    if not strange and len(count) == len(order) == size:
        return
    of = f"{schedule.micro_batches} micro-batches" + (f" in {schedule.chunks} chunks" if schedule.chunks > 1 else "")
    if strange:
        raise UserError(
            f"stage {stage} has {strange[0]}{_more(strange)}, but the schedule is one of {of}, counted from 0, "
            f"with operations {', '.join(kinds)}: take it out."
        )
    if twice := [op for op in count if count[op] > 1]:
        places = [str(index + 1) for index, op in enumerate(order) if op == twice[0]]
        raise UserError(
            f"stage {stage} runs {twice[0]} {count[twice[0]]} times{_more(twice)}, as its operations "
            f"{' and '.join(places)} of {len(order)}: leave one of them."
        )
    op = next(op for op in due if not count[op])
    missing = range(size - len(count))
    raise UserError(
        f"stage {stage} never runs {op}{_more(missing)} (the schedule is one of {of}): {_loss(op, schedule)}. "
        f"Add {op} to stage {stage}{'' if op.kind == 'F' else f' after {op._replace(kind=_BEFORE[op.kind])}'}."
    )


def _exists(op: Op, schedule: Schedule, kinds: str) -> bool:
    return op.kind in kinds and 0 <= op.micro_batch < schedule.micro_batches and 0 <= op.chunk < schedule.chunks


def _loss(op: Op, schedule: Schedule) -> str:
    if op.kind == "F":
        return f"micro-batch {op.micro_batch} never gets through"
    if op.kind == "B" and schedule.splits_backward:
        return f"the activation of {op._replace(kind='F')} is never freed, and no gradient is passed on"
    what = "the gradient of its weights" if op.kind == "W" else "its gradient"
    return f"the activation of {op._replace(kind='F')} is never freed, and {what} is missing"


def _more(ops: Sequence) -> str:
    return f" (and {len(ops) - 1} more)" if len(ops) > 1 else ""


def _deadlock(schedule: Schedule, done: Sequence[StageOp], stuck: Mapping[int, StageOp]) -> str:
    """Describe the cycle of waiting stages, and one operation to move that resolves the deadlock."""
    at = Counter(place.stage for place in done)
    circle = _circle(stuck)
    told = "; ".join(_waits(schedule, stage, at[stage], stuck[stage]) for stage in circle)
    if others := len(stuck) - len(circle):
        told += f"; {others} more wait{'s' * (others == 1)} for these"
    change = next(filter(None, (_moved(schedule, at, stuck[stage]) for stage in circle)), None)
    return f"the schedule deadlocks: {told}. " + (change or "The order of gpipe or 1f1b runs: begin with that.")


def _circle(stuck: Mapping[int, StageOp]) -> list[int]:
    """Return the stages of a cycle in the wait-for graph."""
    seen: list[int] = []
    stage = min(stuck)
    while stage not in seen:
        seen.append(stage)
        stage = stuck[stage].stage
    return seen[seen.index(stage) :]


def _waits(schedule: Schedule, stage: int, index: int, needed: StageOp) -> str:
    order = schedule.orders[stage]
    later = schedule.orders[needed.stage].index(needed.op) + 1
    whose = "its own" if needed.stage == stage else f"stage {needed.stage}'s"
    return (
        f"stage {stage} waits at {order[index]} (operation {index + 1} of {len(order)}) for {whose} {needed.op} "
        f"(operation {later})"
    )


def _moved(schedule: Schedule, at: Mapping[int, int], needed: StageOp) -> str | None:
    """Return the advice to move `needed` before the operation where its stage waits; None if that does not help."""
    order = list(schedule.orders[needed.stage])
    index = at[needed.stage]
    order.remove(needed.op)
    order.insert(index, needed.op)
    orders = [order if stage == needed.stage else old for stage, old in enumerate(schedule.orders)]
    _, stuck = execution_order(replace(schedule, orders=orders))
    return None if stuck else f"Put {needed.op} before {order[index + 1]} on stage {needed.stage}."
