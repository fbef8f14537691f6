"""Unions, intersections and lanes of time intervals (begin, end) on one clock, in any unit."""

from collections import deque
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, as ascending (begin, end) pairs that do not touch."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], end)
        elif end > begin:
            covered.append((begin, end))
    return covered


def intersect_intervals(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of the union of `a` and the union of `b`, as ascending intervals that do not touch."""
    a, b, overlaps = deque(merge_intervals(a)), deque(merge_intervals(b)), []
    while a and b:
        overlaps.append((max(a[0][0], b[0][0]), min(a[0][1], b[0][1])))
        (a if a[0][1] < b[0][1] else b).popleft()
    return merge_intervals(overlaps)


def covered_time(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals, so that overlaps count once."""
    return sum(end - begin for begin, end in merge_intervals(intervals))


def assign_lanes(intervals: Sequence[Interval]) -> list[int]:
    """Return a lane (a row of the drawing, numbered from 0) for each interval, so that no two of a lane overlap.

    intervals: (begin, end) pairs, sorted by begin.
    """
    free: list[float] = []  # the end of the last interval in each lane
    lanes = []
    for begin, end in intervals:
        lane = next((i for i, free_from in enumerate(free) if free_from <= begin), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes
