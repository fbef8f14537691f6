"""Stragglers: the rank that all others wait for, found from the time that each rank waits for communication."""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

MIN_STEPS = 5  # a pause in a single step makes no straggler


class Straggler(NamedTuple):
    """A rank that is slower than the others, which wait for it in collectives.

    excess_s: seconds per step by which the median of the other ranks waits longer than this rank: about the time that
    each step would gain if the rank were as fast as they are.
    """

    rank: int
    excess_s: float


def find_straggler(waited_s: Sequence[float], step_time_s: float, threshold: float) -> Straggler | None:
    """Return the slowest rank, the rank that waits least, if its excess is more than `threshold` times the step time.

    Returns None if there is no such rank. waited_s: by rank, the seconds per step that the rank waited for
    communication. step_time_s: seconds per step of the slowest rank. threshold: a fraction; 0 turns the detection off.
    """
    if len(waited_s) < 2 or not threshold:
        return None
    rank = min(range(len(waited_s)), key=waited_s.__getitem__)
    excess_s = median_low(seconds for other, seconds in enumerate(waited_s) if other != rank) - waited_s[rank]
    return Straggler(rank, excess_s) if excess_s > threshold * step_time_s else None
