"""Tests of one_f_one_b_schedule: the schedule is run by `exercises/pipeline.py`, which knows no rule."""

from exercises.pipeline import expect_each_once, orders_of, outcome
from exercises.testing import Wrong, expect, test

SIZES = [(1, 1), (1, 3), (2, 4), (3, 7), (4, 4), (4, 2), (3, 1), (5, 8)]  # stages, micro-batches


@test(points=3)
def each_once(answer):
    """Every micro-batch goes through every stage once forward and once backward, also when there are few of them."""
    for stages, micro_batches in SIZES:
        expect_each_once(orders_of(answer.one_f_one_b, stages, micro_batches), micro_batches)


@test(points=3)
def nobody_waits_for_ever(answer):
    """The stages' orders fit together: every operation begins at some time."""
    for stages, micro_batches in SIZES:
        outcome(orders_of(answer.one_f_one_b, stages, micro_batches), 1.0, 1.0)


@test(points=4)
def as_soon_as_gpipe(answer):
    """A step takes (micro-batches + stages - 1) forwards and as many backwards: no longer than GPipe's."""
    for stages, micro_batches in SIZES:
        orders = orders_of(answer.one_f_one_b, stages, micro_batches)
        for f, b in ((1.0, 1.0), (1.0, 2.0), (3.0, 1.0)):
            end = outcome(orders, f, b).end
            case = f"{stages} stages, {micro_batches} micro-batches, a forward takes {f:g}, a backward {b:g}"
            expect("the end of the step", end, (micro_batches + stages - 1) * (f + b), case=case)


@test(points=4)
def few_are_alive(answer):
    """Stage s keeps the activations of min(stages - s, micro-batches) micro-batches, and of no more."""
    for stages, micro_batches in SIZES:
        orders = orders_of(answer.one_f_one_b, stages, micro_batches)
        for stage, got in enumerate(outcome(orders, 1.0, 1.0).alive):
            most = min(stages - stage, micro_batches)
            if got > most:
                case = f"stage {stage} of {stages}, {micro_batches} micro-batches"
                raise Wrong("wrong", "micro-batches alive at one time", f"at most {most}", str(got), case=case)
