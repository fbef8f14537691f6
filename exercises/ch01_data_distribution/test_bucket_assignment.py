"""Tests of bucket_assignment: the reference takes, for each bucket, the longest run of names that fits."""

import itertools

from exercises.testing import expect, test

SIZES = [
    [],
    [4],
    [4, 4],
    [4, 4, 4],
    [3, 3, 3, 3],
    [9],
    [1, 9, 1],
    [9, 9],
    [8, 1, 8],
    [1, 7, 1, 7],
    [5, 4, 3, 2, 1],
    [0, 8, 0, 0, 1],
    [2, 2, 2, 2, 2, 2, 2],
    [9, 0, 1],
    [2**40, 1, 2**40 + 1, 3],
]
LIMITS = (1, 4, 8, 9, 100)


def named(sizes):
    """Return names to bytes; the alphabetical order of the names is not that of the parameters."""
    return {f"{'zyxwvut'[i]}.weight": size for i, size in enumerate(sizes)}


def cut(sizes, limit):
    """Return the buckets: each is the longest run of names that fits, or a single name."""
    names, buckets = list(sizes), []
    while names:
        fits = [n for n in range(1, len(names) + 1) if sum(sizes[name] for name in names[:n]) <= limit]
        most = max(fits, default=1)
        buckets.append(names[:most])
        names = names[most:]
    return buckets


@test(points=2)
def every_name_once(answer):
    """Every parameter is in exactly one bucket, in the order given, and no bucket is empty."""
    for sizes in map(named, SIZES):
        before = dict(sizes)
        for limit in LIMITS:
            got = answer.assign_buckets(sizes, limit)
            expect("the concatenated names of all buckets", sum(map(list, got), []), list(sizes))
            expect("whether every bucket has a name", [len(bucket) > 0 for bucket in got], [True] * len(got))
            expect("`sizes` after the call", list(sizes.items()), list(before.items()))


@test(points=3)
def within_the_limit(answer):
    """No bucket exceeds the limit, except one with a single parameter that is larger than the limit."""
    for sizes in map(named, SIZES):
        for limit in LIMITS:
            got = answer.assign_buckets(sizes, limit)
            large = [bucket for bucket in got if len(bucket) > 1 and sum(sizes[name] for name in bucket) > limit]
            expect(f"buckets of several parameters above {limit} bytes", large, [])
    expect("the buckets", answer.assign_buckets({"a": 5, "b": 5}, 8), [["a"], ["b"]])


@test(points=5)
def fills_each_bucket(answer):
    """A bucket takes the next parameter if it fits: every message has a fixed cost."""
    for sizes in map(named, SIZES):
        for limit in LIMITS:
            expect("the buckets", answer.assign_buckets(sizes, limit), cut(sizes, limit))
    for count in (2, 3, 4):
        for sizes in itertools.product((0, 1, 2, 5), repeat=count):
            for limit in (1, 3, 4):
                expect("the buckets", answer.assign_buckets(named(sizes), limit), cut(named(sizes), limit))
