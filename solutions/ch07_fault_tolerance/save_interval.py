"""How often to save: the solution, as it stands in minidist.simple.recovery.

Work without saves is lost with probability 1 - exp(-t / M), so the expected time grows exponentially with the
interval; a save costs the same whatever the interval. The best interval balances the two: to first order it is sqrt(2
D M) (Young 1974), in which the restart does not occur, because it is paid per failure and not per save.

M is the mean time between failures of the whole run: a thousand ranks fail a thousand times as often as one, so the
interval must shrink with the square root of the number of ranks. For small D / M all formulas agree; if a save takes
as long as the time between failures, only the exact model is right. expm1 keeps the digits when the interval is much
shorter than M.

Usual wrong answers:
* never searches beyond a day, which is too short where the numbers are years
* exp(x) - 1, which has no correct digit left for tiny x
* the package's own
* the same number, whatever is asked
* Daly's higher-order approximation, which differs in the fourth digit, and fails where saves are long
* counts one failure at most per interval
* adds the save as if no failure could interrupt it
* lets the restart change the interval, as in sqrt(2 D (M + R))
* adds one restart per interval, whether it failed or not
* counts a restart per failure, but none that fails itself
* the time from the begin of one interval to the next, with the save in it
* searches up to a tenth of the time between failures only
* minimises the time of an interval instead of the time per second of work: the shortest interval
* stops when the range is a thousandth of the time between failures, which may be months
* tries whole seconds only
* Young's approximation, which is wrong by more than a per cent unless failures are rare
* zeros
"""

import math


def expected_time_s(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected time, in seconds, until `interval_s` seconds of work are done and saved, despite failures.

    Failures are a Poisson process, on average every mtbf_s seconds; they also occur in saves and restarts. save_s:
    seconds per save. restart_s: seconds from a failure until work goes on from the last save.
    """
    # Daly 2006, equation 13: M exp(R / M) (exp((tau + D) / M) - 1).
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)


def best_interval_s(mtbf_s: float, save_s: float, restart_s: float = 0.0) -> float:
    """Return the `interval_s`, in seconds, with the least `expected_time_s` per second of work."""
    # The cost has one minimum, between 0 and mtbf_s. A ternary search: it is not beyond the worse one of two points.
    low, high = 0.0, mtbf_s
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        costs = [expected_time_s(at, mtbf_s, save_s, restart_s) / at for at in (left, right)]
        low, high = (low, right) if costs[0] < costs[1] else (left, high)
    return (low + high) / 2
