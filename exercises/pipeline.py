"""Evaluate the pipeline schedules that answers return, independently of the package's own code.

Every stage runs its operations in order. F of a micro-batch needs its F on the stage before; B needs its own F, and
its B on the stage after.
"""

from collections.abc import Sequence
from typing import NamedTuple

from exercises.testing import Wrong, expect, show


class ScheduleResult(NamedTuple):
    """The end time of a schedule, and each stage's peak number of in-flight micro-batches."""

    end: float
    peak_in_flight: list[int]


def operations_by_stage(rule, stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return the operations of every stage as (kind, micro-batch), from `rule(stage, stages, micro_batches)`."""
    orders = [rule(stage, stages, micro_batches) for stage in range(stages)]
    for order in orders:
        valid = isinstance(order, list) and all(isinstance(op, tuple) and len(op) >= 2 for op in order)
        if not valid:
            got = type(order).__name__ if not isinstance(order, list) else show(order)
            raise Wrong("type", "a stage's operations have the wrong type", "a list of Action", got)
    return [[(op[0], op[1]) for op in order] for order in orders]


def expect_each_operation_once(orders: Sequence[Sequence[tuple[str, int]]], micro_batches: int) -> None:
    """Fail unless every stage runs every micro-batch once forward and once backward."""
    expected = sorted((kind, micro_batch) for kind in "FB" for micro_batch in range(micro_batches))
    for stage, order in enumerate(orders):
        case = f"stage {stage} of {len(orders)}, {micro_batches} micro-batches"
        expect("the actions, sorted", _names(sorted(order)), _names(expected), case=case)


def simulate_schedule(
    orders: Sequence[Sequence[tuple[str, int]]], f: float, b: float, comm: float = 0.0
) -> ScheduleResult:
    """Simulate a schedule with times `f` of F, `b` of B and `comm` of a transfer. Raises Wrong if stages deadlock."""
    stages, ends, peak_in_flight = len(orders), {}, []
    next_operation, clock = [0] * stages, [0.0] * stages
    progressed = True
    while progressed:
        progressed = False
        for stage, order in enumerate(orders):
            while next_operation[stage] < len(order):
                kind, micro_batch = order[next_operation[stage]]
                needs = [(stage, ("F", micro_batch), 0.0)] if kind == "B" else []
                neighbour = stage + 1 if kind == "B" else stage - 1
                if 0 <= neighbour < stages:
                    needs.append((neighbour, (kind, micro_batch), comm))
                if not all((place, op) in ends for place, op, _ in needs):
                    break
                start = max([clock[stage], *(ends[place, op] + late for place, op, late in needs)])
                clock[stage] = ends[stage, (kind, micro_batch)] = start + (f if kind == "F" else b)
                next_operation[stage] += 1
                progressed = True
    stuck = [
        f"stage {stage} at {_names([order[next_operation[stage]]])}"
        for stage, order in enumerate(orders)
        if next_operation[stage] < len(order)
    ]
    if stuck:
        raise Wrong("wrong", f"the stages wait for each other for ever: {', '.join(stuck)}", case=f"{stages} stages")
    for order in orders:
        in_flight = peak = 0
        for kind, _ in order:
            in_flight += 1 if kind == "F" else -1
            peak = max(peak, in_flight)
        peak_in_flight.append(peak)
    return ScheduleResult(max(clock), peak_in_flight)


def _names(ops: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{micro_batch}" for kind, micro_batch in ops)
