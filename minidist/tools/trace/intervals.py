"""Stretches of time on one clock: (begin, end) pairs, and what they cover together."""

from collections import deque
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of them covers, as ascending intervals that do not touch."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], end)
        elif end > begin:
            covered.append((begin, end))
    return covered


def both(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """What `a` and `b` both cover, in the form of `union`."""
    a, b, found = deque(union(a)), deque(union(b)), []
    while a and b:
        found.append((max(a[0][0], b[0][0]), min(a[0][1], b[0][1])))
        (a if a[0][1] < b[0][1] else b).popleft()
    return union(found)


def length(intervals: Iterable[Interval]) -> float:
    """How much they cover together."""
    return sum(end - begin for begin, end in union(intervals))


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """A lane for each interval, in order of their begins, so that no two in one lane overlap."""
    free: list[float] = []  # where the last interval of each lane ends
    chosen = []
    for begin, end in intervals:
        lane = next((i for i, free_from in enumerate(free) if free_from <= begin), len(free))
        free[lane : lane + 1] = [end]
        chosen.append(lane)
    return chosen
