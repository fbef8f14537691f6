"""Tests of save_interval: the expected time from the number of attempts, and its minimum from a grid of points."""

import math

from exercises.testing import expect, test

DAY, YEAR = 86400.0, 365.25 * 86400.0
# mtbf_s, save_s, restart_s
CASES = {
    "Llama 3": (10800.0, 30.0, 60.0),
    "no restart": (10800.0, 30.0, 0.0),
    "a reliable node": (YEAR, 5.0, 600.0),
    "saves of milliseconds": (3.0, 0.002, 0.01),
    "saves as long as the time between failures": (100.0, 100.0, 10.0),
    "saves longer than that": (60.0, 150.0, 5.0),
    "a long restart": (2000.0, 20.0, 3000.0),
    "all numbers are milliseconds or less": (0.005, 0.0001, 0.002),
    "all numbers are days or more": (900 * YEAR, 2 * DAY, 30 * DAY),
}


def reference(interval, mtbf, save, restart):
    """Attempts of work and save until one has no failure; each failed one loses its time and is followed by restarts.

    An attempt of length `length` succeeds with probability p. A failed one lasts, on average, as long as an exponential
    time that is known to be shorter than `length`. A restart is an attempt as well, which failures interrupt.
    """

    def until_success(length, after_failure):
        p = math.exp(-length / mtbf)
        failures = -math.expm1(-length / mtbf) / p
        lost = mtbf - length * p / -math.expm1(-length / mtbf)
        return length + failures * (lost + after_failure)

    restart_time = until_success(restart, 0.0) if restart else 0.0
    return until_success(interval + save, restart_time)


def best(mtbf, save, restart):
    """The best of a grid, refined around its best point."""
    low, high = -14.0, 0.0  # of the logarithm of interval / mtbf
    for _ in range(12):
        grid = [low + (high - low) * i / 40 for i in range(41)]
        costs = [math.log(reference(mtbf * math.exp(x), mtbf, save, restart)) - x for x in grid]
        at = costs.index(min(costs))
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, 40)]
    return mtbf * math.exp((low + high) / 2)


def close(what, got, expected, digits, case):
    expect(what, got, expected, case=case, tolerance=abs(expected) * 10.0**-digits)


@test(points=3)
def expected_time_without_restart(answer):
    """Work and save, repeated until no failure interrupts them."""
    for interval, mtbf, save in ((800.0, 10800.0, 30.0), (10.0, 100.0, 2.0), (1.0, 3.0, 0.002), (60.0, 50.0, 90.0)):
        got = answer.expected_time_s(interval, mtbf, save, 0.0)
        close("the expected time", got, reference(interval, mtbf, save, 0.0), 5, "")


@test(points=3)
def failures_while_restarting(answer):
    """Each failure costs a restart, which may fail as well."""
    rows = [(800.0, 10800.0, 30.0, 60.0), (30.0, 100.0, 2.0, 80.0), (9.0, 50.0, 1.0, 1.0)]
    rows += [(part * mtbf, mtbf, save, restart) for mtbf, save, restart in CASES.values() for part in (0.001, 0.3, 2.5)]
    for interval, mtbf, save, restart in rows:
        got = answer.expected_time_s(interval, mtbf, save, restart)
        close("the expected time", got, reference(interval, mtbf, save, restart), 5, "")


@test(points=2)
def rare_failures_lose_no_digits(answer):
    """With failures once in years the expected time is that of work and save, plus what is lost, to all digits."""
    for interval, save in ((1.0, 0.001), (3600.0, 5.0)):
        mtbf = 1e7 * YEAR
        length = interval + save
        got = answer.expected_time_s(interval, mtbf, save, 60.0)
        close("the expected time", got, length + length * (length / 2 + 60.0) / mtbf, 12, "")


@test(points=4)
def least_cost_per_second_of_work(answer):
    """The interval with the least expected time per second of work, to four digits."""
    for name, (mtbf, save, restart) in CASES.items():
        got = answer.best_interval_s(mtbf, save, restart)
        close(
            "the best interval",
            got,
            best(mtbf, save, restart),
            4,
            f"{name}: best_interval_s({mtbf}, {save}, {restart})",
        )


@test(points=2)
def more_ranks_save_more_often(answer):
    """A run on n times as many ranks fails n times as often; the restart has a default of 0."""
    for ranks in (1, 16, 1024, 16384):
        mtbf = 5 * YEAR / ranks
        got = answer.best_interval_s(mtbf, 20.0)
        close("the best interval", got, best(mtbf, 20.0, 0.0), 4, f"{ranks} ranks: best_interval_s({mtbf}, 20.0)")
