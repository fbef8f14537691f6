"""Tests of gpipe_schedule: schedules written by hand, and a simulator that knows no schedule."""

import itertools

from exercises.pipeline import expect_schedule, operation_names, simulate_schedule
from exercises.testing import expect, test


@test(points=5)
def all_forwards_then_all_backwards(answer):
    """Every stage runs all forwards and then all backwards, both in the order of the micro-batches."""
    expected = {
        1: "F0 B0",
        2: "F0 F1 B0 B1",
        3: "F0 F1 F2 B0 B1 B2",
        4: "F0 F1 F2 F3 B0 B1 B2 B3",
        5: "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        0: "",
        11: "F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 B0 B1 B2 B3 B4 B5 B6 B7 B8 B9 B10",
    }
    for (number, wanted), stages in itertools.product(expected.items(), (1, 2, 3, 4, 7)):
        case = f"{stages} stages, {number} micro-batches"
        for stage, actions in enumerate(expect_schedule(answer.gpipe(stages, number), stages, case)):
            expect(f"the actions of stage {stage}", operation_names(actions), wanted, case=case)


@test(points=3)
def bubble_of_the_formula(answer):
    """A step takes the time of (micro-batches + stages - 1) forwards and as many backwards; all are in flight."""
    for stages, number in ((2, 1), (2, 4), (4, 3), (4, 12)):
        case = f"{stages} stages, {number} micro-batches, a forward takes 1, a backward 2"
        result = simulate_schedule(expect_schedule(answer.gpipe(stages, number), stages, case), 1.0, 2.0)
        expect("the end of the step", result.end, 3.0 * (number + stages - 1), case=case)
        expect("peak number of micro-batches in flight, by stage", result.peak_in_flight, [number] * stages, case=case)
