"""Unions, intersections and lanes of time intervals (begin, end) on one clock, in any unit."""

from collections import deque
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of (begin, end) intervals as ascending intervals that neither overlap nor touch."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], end)
        elif end > begin:
            covered.append((begin, end))
    return covered


def intersect_intervals(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the times that are both in an interval of `a` and in one of `b`, as ascending (begin, end) intervals."""
    a, b, overlaps = deque(merge_intervals(a)), deque(merge_intervals(b)), []
    while a and b:
        overlaps.append((max(a[0][0], b[0][0]), min(a[0][1], b[0][1])))
        (a if a[0][1] < b[0][1] else b).popleft()
    return merge_intervals(overlaps)


def covered_time(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of the intervals: time that several intervals cover counts once."""
    return sum(end - begin for begin, end in merge_intervals(intervals))


def assign_lanes(intervals: Sequence[Interval]) -> list[int]:
    """Return for each interval the number, from 0, of the lane in which to draw it: intervals of a lane do not overlap.

    intervals: (begin, end) pairs, sorted by begin.
    """
    free: list[float] = []  # the end of the last interval in each lane
    lanes = []
    for begin, end in intervals:
        lane = next((i for i, free_from in enumerate(free) if free_from <= begin), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes
