"""Check a schedule before it runs: completeness, deadlocks, and in-flight micro-batches.

Schedules written by hand fail in three ways: an action is missing or duplicated, so that a gradient is wrong or an
activation is never freed; stages wait for each other forever; or the schedule needs too much memory. The published
schedules (`parallel.pipeline.schedules`) pass these checks for every size, so the trainer does not repeat them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from minidist.errors import UserError, format_count
from minidist.parallel.pipeline.actions import Action, Schedule, StageAction, find_order_and_deadlocks
from minidist.parallel.pipeline.transfers import StageProgram, Transfer

_BEFORE = {"B": "F", "W": "B"}


def check_schedule(schedule: Schedule) -> list[int]:
    """Check that each stage runs every action exactly once, and that the schedule cannot deadlock.

    Returns the peak number of in-flight micro-batches of each stage (`peak_live_micro_batches`). Raises UserError,
    which names the stages and actions and, if there is one, a single change that repairs the schedule.
    """
    for stage in range(schedule.num_stages):
        _check_complete(schedule, stage)
    places, stuck = find_order_and_deadlocks(schedule)
    if stuck:
        raise UserError(_describe_deadlock(schedule, places, stuck))
    return peak_live_micro_batches(schedule)


def peak_live_micro_batches(schedule: Schedule) -> list[int]:
    """Return the peak number of in-flight micro-batches of each stage, in stage order.

    A micro-batch is in flight from the start of its F to the end of its last backward action (W if backward is split,
    else B). The number depends only on the order of actions. A micro-batch counts once for each chunk of the stage in
    which it is in flight; with c chunks, each count stands for 1/c of the micro-batch's activations on the stage.
    """
    return [max(live_micro_batches_per_action(schedule, stage), default=0) for stage in range(schedule.num_stages)]


def live_micro_batches_per_action(schedule: Schedule, stage: int) -> list[int]:
    """Return the number of micro-batches in flight on a stage during each of its actions, in execution order."""
    ends, order = schedule.last_action_kind, schedule.orders[stage]
    held = accumulate((action.kind == "F") - (action.kind == ends) for action in order)
    return [count + (action.kind == ends) for count, action in zip(held, order, strict=True)]


def check_rendezvous(schedule: Schedule, programs: Sequence[StageProgram]) -> None:
    """Check that a schedule's stages finish even if each send and each receive blocks until the other is posted.

    programs: for each stage, its actions and transfers (sends and receives) in order, as from `insert_transfers`.
    Raises UserError if stages deadlock, or if a stage uses or sends a tensor that it does not have.
    """
    at = [0] * len(programs)
    have: list[set[StageAction]] = [set() for _ in programs]
    awake = list(range(len(programs)))
    while awake:
        stage = awake.pop()
        while at[stage] < len(programs[stage]):
            step = programs[stage][at[stage]]
            if isinstance(step, Transfer):
                peer = _find_matching_peer(programs, at, stage, step)
                if peer is None:
                    break
                sender = step.result_of.stage
                _check_available(have[sender], sender, step.result_of, "sends it")
                have[peer if sender == stage else stage].add(step.result_of)
                at[peer] += 1
                awake.append(peer)
            else:
                for need in schedule.dependencies(stage, step):
                    _check_available(have[stage], stage, need, f"runs {step}")
                have[stage].add(StageAction(stage, step))
            at[stage] += 1
    if stuck := [stage for stage, program in enumerate(programs) if at[stage] < len(program)]:
        waits = "; ".join(f"stage {stage} waits in {programs[stage][at[stage]]}" for stage in stuck)
        raise UserError(
            f"the transfers deadlock: {waits}. Give both ends of each a place in one order: insert_transfers."
        )


def _check_complete(schedule: Schedule, stage: int) -> None:
    """Raise UserError unless the stage has every required action exactly once, and no other."""
    order = schedule.orders[stage]
    kinds = "FBW" if schedule.splits_backward else "FB"
    # A generator: a schedule with F0 and F999999999 must not build a huge set.
    due = (Action(k, m, c) for m in range(schedule.micro_batches) for c in range(schedule.num_chunks) for k in kinds)
    size = schedule.micro_batches * schedule.num_chunks * len(kinds)
    count = Counter(order)
    strange = [action for action in order if not _is_valid_action(action, schedule, kinds)]
    if not strange and len(count) == len(order) == size:
        return
    of = format_count(schedule.micro_batches, "micro-batch", "micro-batches") + (
        f" in {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    )
    if strange:
        raise UserError(
            f"stage {stage} has {strange[0]}{_format_more(strange)}, but the schedule is one of {of}, counted from 0, "
            f"with actions {', '.join(kinds)}: take it out."
        )
    if twice := [action for action in count if count[action] > 1]:
        places = [str(index + 1) for index, action in enumerate(order) if action == twice[0]]
        raise UserError(
            f"stage {stage} runs {twice[0]} {count[twice[0]]} times{_format_more(twice)}, as its actions "
            f"{' and '.join(places)} of {len(order)}: leave one of them."
        )
    action = next(action for action in due if not count[action])
    missing = range(size - len(count))
    raise UserError(
        f"stage {stage} never runs {action}{_format_more(missing)} (the schedule is one of {of}): "
        f"{_describe_consequence(action, schedule)}. Add {action} to stage {stage}"
        f"{'' if action.kind == 'F' else f' after {action._replace(kind=_BEFORE[action.kind])}'}."
    )


def _is_valid_action(action: Action, schedule: Schedule, kinds: str) -> bool:
    """Return whether the action's kind is one of `kinds`, and its micro-batch and chunk are in the schedule."""
    in_range = 0 <= action.micro_batch < schedule.micro_batches and 0 <= action.chunk < schedule.num_chunks
    return action.kind in kinds and in_range


def _describe_consequence(action: Action, schedule: Schedule) -> str:
    """Return what goes wrong in training if `action` is missing, as text."""
    if action.kind == "F":
        return f"micro-batch {action.micro_batch} never gets through"
    if action.kind == "B" and schedule.splits_backward:
        return f"the activation of {action._replace(kind='F')} is never freed, and no gradient is passed on"
    what = "the gradient of its weights" if action.kind == "W" else "its gradient"
    return f"the activation of {action._replace(kind='F')} is never freed, and {what} is missing"


def _format_more(actions: Sequence) -> str:
    """Return " (and 2 more)" for a list of three, of which the message names one; "" for one."""
    return f" (and {len(actions) - 1} more)" if len(actions) > 1 else ""


def _describe_deadlock(schedule: Schedule, done: Sequence[StageAction], stuck: Mapping[int, StageAction]) -> str:
    """Return the error message: the cycle of waiting stages, and one move that resolves the deadlock.

    done: the actions that have run. stuck: for each waiting stage, the action that it needs.
    """
    at = Counter(place.stage for place in done)
    circle = _find_cycle(stuck)
    told = "; ".join(_describe_wait(schedule, stage, at[stage], stuck[stage]) for stage in circle)
    if others := len(stuck) - len(circle):
        told += f"; {others} more wait{'s' * (others == 1)} for these"
    change = next(filter(None, (_suggest_move(schedule, at, stuck[stage]) for stage in circle)), None)
    return f"the schedule deadlocks: {told}. " + (change or "The order of gpipe or 1f1b runs: begin with that.")


def _find_cycle(stuck: Mapping[int, StageAction]) -> list[int]:
    """Return the stages of a cycle in the wait-for graph."""
    seen: list[int] = []
    stage = min(stuck)
    while stage not in seen:
        seen.append(stage)
        stage = stuck[stage].stage
    return seen[seen.index(stage) :]


def _describe_wait(schedule: Schedule, stage: int, index: int, needed: StageAction) -> str:
    """Return a clause that says at which action a stage waits, and for which action of which stage."""
    order = schedule.orders[stage]
    later = schedule.orders[needed.stage].index(needed.action) + 1
    whose = "its own" if needed.stage == stage else f"stage {needed.stage}'s"
    return (
        f"stage {stage} waits at {order[index]} (action {index + 1} of {len(order)}) for {whose} {needed.action} "
        f"(action {later})"
    )


def _suggest_move(schedule: Schedule, at: Mapping[int, int], needed: StageAction) -> str | None:
    """Return the advice to move `needed` before the action at which its stage waits; None if that does not help.

    at: by stage, the index of the action at which it waits.
    """
    order = list(schedule.orders[needed.stage])
    index = at[needed.stage]
    order.remove(needed.action)
    order.insert(index, needed.action)
    orders = [order if stage == needed.stage else old for stage, old in enumerate(schedule.orders)]
    _, stuck = find_order_and_deadlocks(replace(schedule, orders=orders))
    return None if stuck else f"Put {needed.action} before {order[index + 1]} on stage {needed.stage}."


def _find_matching_peer(programs: Sequence[StageProgram], at: Sequence[int], stage: int, step: Transfer) -> int | None:
    """Return the peer of a transfer if the other end of this transfer is the peer's next step, else None.

    at: by stage, the index of its next step. stage: this stage.
    """
    program, index = programs[step.peer], at[step.peer]
    other = Transfer("recv" if step.kind == "send" else "send", stage, step.result_of)
    return step.peer if index < len(program) and program[index] == other else None


def _check_available(have: set[StageAction], stage: int, need: StageAction, what: str) -> None:
    """Raise UserError if `stage` does not have the result of `need` yet. what: the use that it makes of it."""
    if need not in have:
        how = "run" if need.stage == stage else "received"
        raise UserError(f"stage {stage} {what} before it has {how} {need}: put that first.")
