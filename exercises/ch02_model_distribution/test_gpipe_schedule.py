"""Tests of gpipe_schedule: the schedule is run by `exercises/pipeline.py`, which knows no rule."""

from exercises.pipeline import expect_each_once, orders_of, outcome
from exercises.testing import expect, test

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 4), (3, 7)]  # stages, micro-batches


@test(points=3)
def each_once(answer):
    """Every micro-batch goes through every stage once forward and once backward."""
    for stages, micro_batches in SIZES:
        expect_each_once(orders_of(answer.gpipe, stages, micro_batches), micro_batches)


@test(points=3)
def all_forwards_first(answer):
    """No backward begins on a stage before its last forward."""
    for stages, micro_batches in SIZES:
        for stage, order in enumerate(orders_of(answer.gpipe, stages, micro_batches)):
            kinds = "".join(kind for kind, _ in order)
            case = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            expect(
                "forwards (F) and backwards (B), in order", kinds, "F" * micro_batches + "B" * micro_batches, case=case
            )


@test(points=4)
def nobody_waits_longer_than_must_be(answer):
    """A step takes (micro-batches + stages - 1) forwards and as many backwards, and no stage waits for ever."""
    for stages, micro_batches in SIZES:
        orders = orders_of(answer.gpipe, stages, micro_batches)
        for f, b in ((1.0, 2.0), (3.0, 1.0)):
            end = outcome(orders, f, b).end
            case = f"{stages} stages, {micro_batches} micro-batches, a forward takes {f:g}, a backward {b:g}"
            expect("the end of the step", end, (micro_batches + stages - 1) * (f + b), case=case)
