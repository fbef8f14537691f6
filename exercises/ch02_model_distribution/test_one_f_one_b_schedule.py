"""Tests of one_f_one_b_schedule: schedules written by hand, and a simulator that knows no schedule."""

from exercises.pipeline import expect_each_operation_once, expect_schedule, operation_names, simulate_schedule
from exercises.testing import Wrong, expect, test

STAGES, NUMBERS = range(1, 8), range(13)


def schedules(answer):
    """Yield (stages, number of micro-batches, the schedule) of many sizes, from small to large."""
    for stages in STAGES:
        for number in NUMBERS:
            case = f"{stages} stages, {number} micro-batches"
            yield stages, number, expect_schedule(answer.one_f_one_b(stages, number), stages, case)


@test(points=4)
def each_action_once(answer):
    """Every stage runs each micro-batch forward once and backward once; without micro-batches it runs nothing."""
    for _, number, schedule in schedules(answer):
        expect_each_operation_once(schedule, range(number))
        for stage, actions in enumerate(schedule):
            case = f"stage {stage} of {len(schedule)}, {number} micro-batches"
            for kind, what in (("F", "forwards"), ("B", "backwards")):
                order = [i for each, i in actions if each == kind]
                expect(f"the order of the {what}", order, [*range(number)], case=case)


@test(points=4)
def few_micro_batches_in_flight(answer):
    """Stage p of n has at most min(n - p, micro-batches) micro-batches in flight."""
    for stages, number, schedule in schedules(answer):
        for stage, got in enumerate(simulate_schedule(schedule, 1.0, 1.0).peak_in_flight):
            most = min(stages - stage, number)
            if got > most:
                case = f"stage {stage} of {stages}, {number} micro-batches: {operation_names(schedule[stage])}"
                raise Wrong("wrong", "peak number of micro-batches in flight", f"at most {most}", str(got), case=case)


@test(points=4)
def as_fast_as_gpipe(answer):
    """A step takes the time of (micro-batches + stages - 1) forwards and as many backwards, as with GPipe."""
    for stages, number, schedule in schedules(answer):
        for f, b in ((1.0, 1.0), (1.0, 2.0), (3.0, 1.0)):
            case = f"{stages} stages, {number} micro-batches, a forward takes {f:g}, a backward {b:g}"
            end = simulate_schedule(schedule, f, b).end
            expect("the end of the step", end, (number + stages - 1) * (f + b) if number else 0, case=case)
