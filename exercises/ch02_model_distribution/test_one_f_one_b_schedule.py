"""Tests of one_f_one_b_schedule: `exercises/pipeline.py` runs the schedule, and knows no schedule rule."""

from exercises.pipeline import expect_each_operation_once, operations_by_stage, simulate_schedule
from exercises.testing import Wrong, expect, test

SIZES = [(1, 1), (1, 3), (2, 4), (3, 7), (4, 4), (4, 2), (3, 1), (5, 8)]  # stages, micro-batches


@test(points=3)
def every_action_once(answer):
    """Every stage runs one forward and one backward per micro-batch, for any number of micro-batches."""
    for stages, micro_batches in SIZES:
        expect_each_operation_once(operations_by_stage(answer.one_f_one_b, stages, micro_batches), micro_batches)


@test(points=3)
def no_deadlock(answer):
    """The stages do not deadlock: every action runs."""
    for stages, micro_batches in SIZES:
        simulate_schedule(operations_by_stage(answer.one_f_one_b, stages, micro_batches), 1.0, 1.0)


@test(points=4)
def as_fast_as_gpipe(answer):
    """A step takes the time of (micro-batches + stages - 1) forwards and as many backwards, as with GPipe."""
    for stages, micro_batches in SIZES:
        orders = operations_by_stage(answer.one_f_one_b, stages, micro_batches)
        for f, b in ((1.0, 1.0), (1.0, 2.0), (3.0, 1.0)):
            end = simulate_schedule(orders, f, b).end
            case = f"{stages} stages, {micro_batches} micro-batches, a forward takes {f:g}, a backward {b:g}"
            expect("the end of the step", end, (micro_batches + stages - 1) * (f + b), case=case)


@test(points=4)
def few_micro_batches_in_flight(answer):
    """Stage s has at most min(stages - s, micro-batches) micro-batches in flight."""
    for stages, micro_batches in SIZES:
        orders = operations_by_stage(answer.one_f_one_b, stages, micro_batches)
        for stage, got in enumerate(simulate_schedule(orders, 1.0, 1.0).peak_in_flight):
            most = min(stages - stage, micro_batches)
            if got > most:
                case = f"stage {stage} of {stages}, {micro_batches} micro-batches"
                raise Wrong("wrong", "peak number of micro-batches in flight", f"at most {most}", str(got), case=case)
