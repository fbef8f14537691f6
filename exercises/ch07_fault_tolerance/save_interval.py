"""How often to save.

A save stalls training; a failure loses all work since the last save. Write the expected time of an interval of work,
and search for the interval with the least expected time per second of work. All arguments and results are numbers, in
seconds: mtbf_s is M of section 7.4, save_s is D, restart_s is R.
The docstrings define them, and a comment in the stub gives Daly's formula.

Example: with mtbf_s=10,800 (Llama 3: a failure every three hours), save_s=30 and restart_s=60,
    expected_time_s(800.0, 10800.0, 30.0, 60.0)   is 867.5: 800 of work, 30 of the save, 37.5 lost to failures
    best_interval_s(10800.0, 30.0, 60.0)          is 785.1 (Young's approximation, sqrt(2 D M), is 805.0)

Checked: equality with an independent derivation, to five digits for the expected time and to four for the interval,
also where saves take longer than the time between two failures, and where the numbers are milliseconds or years.

You may call:
    math.exp(x), math.expm1(x)   e^x, and e^x - 1 without loss of digits for a small x
    math.log(x), math.sqrt(x)

Check it with: python -m exercises check save_interval

Stub d66048a2.
"""

import math


def expected_time_s(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected time, in seconds, until `interval_s` seconds of work are done and saved, despite failures.

    Failures are a Poisson process, on average every mtbf_s seconds; they also occur in saves and restarts. save_s:
    seconds per save. restart_s: seconds from a failure until work goes on from the last save.
    """
    # Daly 2006, equation 13: M exp(R / M) (exp((tau + D) / M) - 1).
    raise NotImplementedError("return the expected time of an interval of work and its save")


def best_interval_s(mtbf_s: float, save_s: float, restart_s: float = 0.0) -> float:
    """Return the `interval_s`, in seconds, with the least `expected_time_s` per second of work."""
    # The cost has one minimum, between 0 and mtbf_s. A ternary search: it is not beyond the worse one of two points.
    raise NotImplementedError("return the interval with the least expected time per second of work")
