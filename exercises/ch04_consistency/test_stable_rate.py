"""Tests of stable_rate: the roots of the recursion's polynomial, by numpy."""

import sys
from unittest import mock

import numpy as np

from exercises.testing import Wrong, expect, learner_globals, show, test
from minidist.simple.consistency import Push, Server


def largest_root(rate, delay):
    """The largest |z| with z^(delay + 1) - z^delay + rate = 0: above 1 the recursion grows."""
    coefficients = [1.0, -1.0, *[0.0] * (delay - 1), rate] if delay else [1.0, rate - 1.0]
    return max(abs(np.roots(coefficients)))


def boundary(delay):
    """The rate at which the largest root is 1, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if largest_root(middle, delay) > 1 + 1e-12 else (middle, high)
    return low


def diverges(answer, lr, delay, *more):
    result = answer.diverges_with_delay(lr, delay, *more)
    if not isinstance(result, bool):
        raise Wrong("type", "diverges_with_delay must return a bool", "True or False", show(result))
    return result


def count_lines(function, args, limit):
    """Count the lines of Python that a call executes, up to `limit`; lines of the functions that it calls included."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        if count < limit:
            return trace
        sys.settrace(before)  # a traced loop is many times slower
        frame.f_trace = None
        return None

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


@test(points=3)
def largest_rate_is_that_of_the_roots(answer):
    """At the largest stable rate the largest root of the recursion lies on the unit circle."""
    for delay in (0, 1, 2, 3, 7, 12, 40, 100):
        rate, expected = answer.max_stable_learning_rate(delay), boundary(delay)
        case = f"delay {delay}, curvature 1"
        expect("the largest stable rate", rate, expected, tolerance=1e-6 * expected, case=case)


@test(points=1)
def rate_falls_with_the_curvature(answer):
    """The largest stable rate is inversely proportional to the curvature."""
    for curvature in (0.01, 2.5, 1000.0):
        rate = answer.max_stable_learning_rate(3, curvature)
        expected = boundary(3) / curvature
        expect("the largest stable rate", rate, expected, tolerance=1e-6 / curvature, case=f"delay 3, {curvature=}")


@test(points=4)
def tells_both_sides_of_the_boundary(answer):
    """2 % above the largest stable rate the parameter grows, 2 % below it falls, and as well much closer to it."""
    cases = [(delay, change) for delay in (*range(10), 40) for change in (-0.02, 0.02)]
    # Here the largest of the last values are 1.053 and falls, and 1.041 and grows: a threshold for them does not do.
    for delay, change in (*cases, (40, -0.0005), (1, 2e-5)):
        grows = diverges(answer, (1 + change) * boundary(delay), delay)
        case = f"delay {delay}, {1 + change} times the largest stable rate"
        expect("whether it diverges", grows, change > 0, case=case)
    for delay, rate in ((4, 0.5), (9, 0.25)):  # the second and the fourth update give exactly 0
        expect("whether it diverges", diverges(answer, rate, delay), True, case=f"delay {delay}, rate {rate}")


@test(points=1)
def makes_the_updates(answer):
    """The experiment does not ask the formula, and makes at least num_updates updates, one after the other."""
    formula, handle, calls, updates = answer.max_stable_learning_rate, Server.handle, [], []

    def counted_formula(*args, **kwargs):
        calls.append(args)
        return formula(*args, **kwargs)

    def counted_handle(server, worker, request):
        updates.append(isinstance(request, Push))
        return handle(server, worker, request)

    names = mock.patch.dict(learner_globals(answer), max_stable_learning_rate=counted_formula)
    with names, mock.patch.object(Server, "handle", counted_handle):
        for delay, num_updates in ((2, 1000), (6, 500)):
            updates.clear()
            diverges(answer, 0.5 * boundary(delay), delay, 1.0, num_updates)
            case = f"diverges_with_delay(lr, {delay}, 1.0, {num_updates})"
            expect("calls of max_stable_learning_rate by diverges_with_delay", len(calls), 0, case=case)
            if updates:
                what = f"whether the server makes {num_updates} updates or more (counted: {sum(updates)})"
                expect(what, sum(updates) >= num_updates, True, case=case)
    # With a delay of 1 a loop may make two updates at a time; a formula, in whatever form, needs a few lines in all.
    num_updates, enough = 2000, 200
    for rate in (0.98 * boundary(1), 0.3):  # the second one converges in fewer than 100 updates
        args = (rate, 1, 1.0, num_updates)
        lines = count_lines(learner_globals(answer)["diverges_with_delay"], args, enough)
        what = f"whether it makes the updates one after the other (lines of Python that it executes: {lines})"
        expect(what, lines >= enough, True, case=f"diverges_with_delay({rate:.2f}, 1, 1.0, {num_updates})")
    # A parameter that grows by sqrt(2) per update does not overflow in 200 updates, not even in float32.
    counts = [
        count_lines(learner_globals(answer)["diverges_with_delay"], (rate, 1, 1.0, 200), 10**6) for rate in (1, 2)
    ]
    lines = f"lines of Python that it executes: {counts[1]}; at rate 1.0: {counts[0]}"
    what = f"whether it makes all updates although the parameter grows ({lines})"
    expect(what, counts[1] > 0.8 * counts[0], True, case="diverges_with_delay(2.0, 1, 1.0, 200): no overflow")


@test(points=1)
def experiment_uses_the_curvature(answer):
    """The gradient is curvature * theta: rate times curvature decides."""
    for curvature in (0.1, 40.0):
        for factor, expected in ((0.95, False), (1.05, True)):
            grows = diverges(answer, factor * boundary(2) / curvature, 2, curvature)
            case = f"delay 2, {curvature=}, {factor} times the largest stable rate"
            expect("whether it diverges", grows, expected, case=case)


@test(points=2)
def overflow_is_divergence(answer):
    """A parameter that becomes infinite or NaN has diverged; with a very small rate nothing grows."""
    for delay in (0, 3):
        expect("whether it diverges", diverges(answer, 1e6, delay), True, case=f"delay {delay}, rate 1e6")
        expect("whether it diverges", diverges(answer, 1e-3, delay), False, case=f"delay {delay}, rate 0.001")
    for delay, rate in ((1, 1e300), (1, 1e-6), (12, 3.0)):
        expect("whether it diverges", diverges(answer, rate, delay), rate > 1, case=f"delay {delay}, rate {rate:g}")
