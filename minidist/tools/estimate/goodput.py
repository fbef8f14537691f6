"""How often to save: the checkpoint interval that loses the least time to saves and failures.

The model (Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", section 2):
failures are a Poisson process with mean time between failures M. A run works for an interval tau, saves for D seconds,
and goes on. A failure loses everything since the last save and costs R seconds of restart; failures may also occur
while saving and restarting. The expected time per interval is

    E(tau) = M exp(R / M) (exp((tau + D) / M) - 1)                                           (Daly, equation 13)

of which tau is useful. All times are in seconds; an interval is useful time and excludes the save that follows.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FailureModel:
    """The mean time between failures of a run, and the time that each checkpoint and each failure costs, in seconds.

    mtbf_s: M, the mean time between failures of the whole run, not of one rank: N ranks fail N times as often as one.
    save_s: D, the time for which one save stalls training. restart_s: R, the time from a failure to the first new step.
    The methods compute the checkpoint interval (tau): the time of useful work between two saves. Raises ValueError
    unless all are finite, mtbf_s and save_s are above 0 and restart_s is at least 0.
    """

    mtbf_s: float
    save_s: float
    restart_s: float = 0.0

    def __post_init__(self):
        for name, value, positive in (
            ("mtbf_s", self.mtbf_s, True),
            ("save_s", self.save_s, True),
            ("restart_s", self.restart_s, False),
        ):
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise ValueError(f"{name} is {value:g}; it must be a finite number {'above 0' if positive else '>= 0'}")

    def young_interval_s(self) -> float:
        """Return Young's first-order approximation of the optimal checkpoint interval, sqrt(2 save_s mtbf_s)."""
        return math.sqrt(2 * self.save_s * self.mtbf_s)

    def daly_interval_s(self) -> float:
        """Return Daly's higher-order approximation of the optimal checkpoint interval (Daly 2006, equation 37).

        It is mtbf_s if save_s is 2 mtbf_s or more.
        """
        ratio = self.save_s / (2 * self.mtbf_s)
        if ratio >= 1:
            return self.mtbf_s
        return self.young_interval_s() * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_s

    def exact_interval_s(self) -> float:
        """Return the optimal checkpoint interval: the seconds of work between saves that give the highest goodput.

        With M = mtbf_s, D = save_s, tau the interval and E(tau) = `expected_time_s`: the derivative of E(tau) / tau is
        0 where (1 - x) exp(x) = exp(-D / M), with x = tau / M between 0 and 1. The left side falls from 1 to 0, so
        there is one solution; x = 1 + W(-exp(-1 - D / M)) in terms of Lambert's W function.
        """
        target = self.save_s / self.mtbf_s  # solve -x - log(1 - x) = D / M
        low, high = 0.0, 1.0
        while low < (middle := (low + high) / 2) < high:
            if _deficit(middle) < target:
                low = middle
            else:
                high = middle
        return self.mtbf_s * high

    def expected_time_s(self, interval_s: float) -> float:
        """Return the expected seconds until `interval_s` seconds of work are done and saved, failures included."""
        try:
            periods = math.expm1((interval_s + self.save_s) / self.mtbf_s)
            return self.mtbf_s * math.exp(self.restart_s / self.mtbf_s) * periods
        except OverflowError:  # so many failures that practically no interval ends without one
            return math.inf

    def goodput(self, interval_s: float) -> float:
        """Return the useful fraction of the run's time, from 0 to 1, if it saves a checkpoint after each `interval_s`
        seconds of work."""
        return interval_s / self.expected_time_s(interval_s)

    def first_order_waste(self, interval_s: float) -> float:
        """Return the fraction of time that saves and failures waste, to first order, with this checkpoint interval.

        It is save_s / interval_s, for the saves, plus (interval_s / 2 + restart_s) / mtbf_s, for the failures. Valid if
        interval_s, save_s and restart_s are much shorter than mtbf_s (Herault and Robert 2015, section 1.3); a result
        above 1 is meaningless.
        """
        return self.save_s / interval_s + (interval_s / 2 + self.restart_s) / self.mtbf_s


def _deficit(x: float) -> float:
    """-x - log(1 - x) = x^2 / 2 + x^3 / 3 + ...; by its series where the two terms would cancel."""
    if x < 0.01:
        return sum(x**n / n for n in range(2, 10))
    return -x - math.log1p(-x) if x < 1 else math.inf
