"""Evaluation of the pipeline schedules that answers return, independent of the package's own code.

A stage runs its operations in their order. F of a micro-batch needs its F on the stage before; B needs its own F, and
its B on the stage after.
"""

from collections.abc import Sequence
from typing import NamedTuple

from exercises.testing import Wrong, expect, show


class Outcome(NamedTuple):
    """The end time of a schedule, and the peak number of in-flight micro-batches of every stage."""

    end: float
    alive: list[int]


def orders_of(rule, stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return the operations of every stage as (kind, micro-batch), from `rule(stage, stages, micro_batches)`."""
    orders = [rule(stage, stages, micro_batches) for stage in range(stages)]
    for order in orders:
        good = isinstance(order, list) and all(isinstance(op, tuple) and len(op) >= 2 for op in order)
        if not good:
            got = type(order).__name__ if not isinstance(order, list) else show(order)
            raise Wrong("type", "a stage's operations have the wrong type", "a list of Op", got)
    return [[(op[0], op[1]) for op in order] for order in orders]


def expect_each_once(orders: Sequence[Sequence[tuple[str, int]]], micro_batches: int) -> None:
    """Fail unless every stage runs every micro-batch once forward and once backward."""
    due = sorted((kind, micro_batch) for kind in "FB" for micro_batch in range(micro_batches))
    for stage, order in enumerate(orders):
        case = f"stage {stage} of {len(orders)}, {micro_batches} micro-batches"
        expect("the operations, sorted", _names(sorted(order)), _names(due), case=case)


def outcome(orders: Sequence[Sequence[tuple[str, int]]], f: float, b: float, comm: float = 0.0) -> Outcome:
    """Simulate the schedule with these times of F, B and a transfer. Raises Wrong if stages deadlock."""
    stages, ends, alive = len(orders), {}, []
    at, clock = [0] * stages, [0.0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, micro_batch = order[at[stage]]
                needs = [(stage, ("F", micro_batch), 0.0)] if kind == "B" else []
                neighbour = stage + 1 if kind == "B" else stage - 1
                if 0 <= neighbour < stages:
                    needs.append((neighbour, (kind, micro_batch), comm))
                if not all((place, op) in ends for place, op, _ in needs):
                    break
                start = max([clock[stage], *(ends[place, op] + late for place, op, late in needs)])
                clock[stage] = ends[stage, (kind, micro_batch)] = start + (f if kind == "F" else b)
                at[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} at {_names([order[at[stage]]])}" for stage, order in enumerate(orders) if at[stage] < len(order)
    ]
    if stuck:
        raise Wrong("wrong", f"the stages wait for each other for ever: {', '.join(stuck)}", case=f"{stages} stages")
    for order in orders:
        held = most = 0
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        alive.append(most)
    return Outcome(max(clock), alive)


def _names(ops: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{micro_batch}" for kind, micro_batch in ops)
