"""Stragglers: the rank that all others wait for, found from the time that each rank waits for communication."""

import math
from collections.abc import Sequence
from statistics import mean, median_low, stdev
from typing import NamedTuple

MIN_STEPS = 5  # a pause in a single step makes no straggler
MIN_LOST_S = 1.0  # what a straggler must have cost before it is worth a line
STANDARD_ERRORS = 2.0  # by which the mean excess must be above the threshold


class Straggler(NamedTuple):
    """A rank that is slower than the others, which wait for it in collectives.

    excess_s: seconds per step by which the median of the other ranks waits longer than this rank: about the time that
    each step would gain if the rank were as fast as they are.
    """

    rank: int
    excess_s: float


def find_straggler(waited_s: Sequence[Sequence[float]], step_time_s: float, threshold: float) -> Straggler | None:
    """Return the slowest rank, the rank that waits least, if its excess is significant; None if there is no such rank.

    The excess varies from step to step, more so on a busy machine. It is significant if its mean, less two standard
    errors, is more than `threshold` times the step time, in at least `MIN_STEPS` steps.

    waited_s: by rank, the seconds that the rank waited for communication in each step. step_time_s: seconds per step of
    the slowest rank. threshold: a fraction; 0 turns the detection off.
    """
    if len(waited_s) < 2 or not threshold or len(waited_s[0]) < MIN_STEPS:
        return None
    rank = min(range(len(waited_s)), key=lambda rank: sum(waited_s[rank]))
    others = zip(*(seconds for other, seconds in enumerate(waited_s) if other != rank), strict=True)
    excess_s = [median_low(in_step) - own for in_step, own in zip(others, waited_s[rank], strict=True)]
    error_s = stdev(excess_s) / math.sqrt(len(excess_s))
    if mean(excess_s) - STANDARD_ERRORS * error_s <= threshold * step_time_s:
        return None
    return Straggler(rank, mean(excess_s))


class StragglerDetector:
    """Names a straggler once it has cost `MIN_LOST_S` seconds without a break. threshold: as in `find_straggler`."""

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._rank: int | None = None
        self._lost_s = 0.0

    def add_steps(self, waited_s: Sequence[Sequence[float]], step_time_s: float) -> Straggler | None:
        """Add consecutive steps; return the rank that has been a straggler long enough, else None.

        waited_s, step_time_s: of these steps, as in `find_straggler`.
        """
        found = find_straggler(waited_s, step_time_s, self._threshold)
        if found is None or found.rank != self._rank:
            self._lost_s = 0.0
        self._rank = found and found.rank
        if found is None:
            return None
        self._lost_s += found.excess_s * len(waited_s[0])
        return found if self._lost_s >= MIN_LOST_S else None
