"""How often to save, by a search (7.4). The fast version is `minidist.tools.estimate.goodput.FailureModel`."""

import math


def expected_time_s(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected time, in seconds, until `interval_s` seconds of work are done and saved, despite failures.

    Failures are a Poisson process, on average every mtbf_s seconds; they also occur in saves and restarts. save_s:
    seconds per save. restart_s: seconds from a failure until work goes on from the last save.
    """
    # Daly 2006, equation 13: M exp(R / M) (exp((tau + D) / M) - 1).
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)


def best_interval_s(mtbf_s: float, save_s: float, restart_s: float = 0.0) -> float:
    """Return the seconds of work between two saves that minimise the expected time per second of work.

    The arguments are those of `expected_time_s`.
    """
    # The cost has one minimum, between 0 and mtbf_s. A ternary search: it is not beyond the worse one of two points.
    low, high = 0.0, mtbf_s
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        costs = [expected_time_s(at, mtbf_s, save_s, restart_s) / at for at in (left, right)]
        low, high = (low, right) if costs[0] < costs[1] else (left, high)
    return (low + high) / 2
