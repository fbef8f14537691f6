"""Tests of gpipe_schedule: `exercises/pipeline.py` runs the schedule, and knows no schedule rule."""

from exercises.pipeline import expect_each_operation_once, operations_by_stage, simulate_schedule
from exercises.testing import expect, test

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 4), (3, 7)]  # stages, micro-batches


@test(points=3)
def every_action_once(answer):
    """Every stage runs one forward and one backward per micro-batch."""
    for stages, micro_batches in SIZES:
        expect_each_operation_once(operations_by_stage(answer.gpipe, stages, micro_batches), micro_batches)


@test(points=3)
def all_forwards_first(answer):
    """On every stage all forwards precede all backwards."""
    for stages, micro_batches in SIZES:
        for stage, order in enumerate(operations_by_stage(answer.gpipe, stages, micro_batches)):
            kinds = "".join(kind for kind, _ in order)
            case = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            expect(
                "forwards (F) and backwards (B), in order", kinds, "F" * micro_batches + "B" * micro_batches, case=case
            )


@test(points=4)
def no_idle_time_beyond_the_bubble(answer):
    """A step takes the time of (micro-batches + stages - 1) forwards and as many backwards, without deadlock."""
    for stages, micro_batches in SIZES:
        orders = operations_by_stage(answer.gpipe, stages, micro_batches)
        for f, b in ((1.0, 2.0), (3.0, 1.0)):
            end = simulate_schedule(orders, f, b).end
            case = f"{stages} stages, {micro_batches} micro-batches, a forward takes {f:g}, a backward {b:g}"
            expect("the end of the step", end, (micro_batches + stages - 1) * (f + b), case=case)
