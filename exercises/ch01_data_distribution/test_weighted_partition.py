"""Tests of weighted_partition: shares by whole numbers, the largest remainder found by hand."""

from exercises.testing import expect, indices, refuses, test

WEIGHTS = [[1], [1, 1], [1, 2], [3, 1], [1, 1, 1], [1, 2, 3], [5, 0, 2], [0, 1], [8, 16, 26], [7, 7, 7, 1], [1, 100]]


def shares(n, weights):
    """Largest remainder for whole weights, one leftover sample at a time."""
    total = sum(weights)
    whole = [n * w // total for w in weights]
    left = [n * w % total for w in weights]
    while sum(whole) < n:
        first = left.index(max(left))
        whole[first] += 1
        left[first] = -1
    return whole


@test(points=3)
def whole_shares(answer):
    """Where every share is whole, each rank gets just that."""
    for weights in WEIGHTS:
        for times in (0, 1, 3):
            expect("the sizes", answer.apportion(sum(weights) * times, weights), [w * times for w in weights])


@test(points=3)
def nothing_is_lost(answer):
    """The sizes add up to n, and each is within one of its exact share."""
    for weights in WEIGHTS:
        for n in range(15):
            got, total = answer.apportion(n, weights), sum(weights)
            expect("the sum of the sizes", sum(got), n)
            near = [abs(size * total - n * w) < total for size, w in zip(got, weights, strict=True)]
            expect(f"sizes within one of the exact shares, not {got}", near, [True] * len(weights))


@test(points=3)
def largest_remainder(answer):
    """What is left over goes to those who lost most by rounding down, ties to the lower rank."""
    for weights in WEIGHTS:
        for n in range(15):
            expect("the sizes", answer.apportion(n, weights), shares(n, weights))


@test(points=2)
def consecutive_blocks(answer):
    """Rank i holds the block of its size that follows those of the ranks before it."""
    for weights in WEIGHTS:
        for n in (0, 1, 5, 13):
            expected, start = [], 0
            for size in shares(n, weights):
                expected.append(list(range(start, start + size)))
                start += size
            for rank, block in enumerate(expected):
                expect("the rank's block", indices(answer.weighted_partition(n, weights, rank)), block)


@test(points=1)
def fractions_of_one(answer):
    """Weights need not be whole numbers."""
    expect("the sizes", answer.apportion(10, [0.5, 0.25, 0.25]), [5, 3, 2])
    expect("the sizes", answer.apportion(7, [0.1, 0.1, 0.1]), [3, 2, 2])
    expect("the sizes", answer.apportion(1003, [0.501, 0.502]), [501, 502])
    expect("the sizes", answer.apportion(9, [0.001, 0.002]), [3, 6])


@test(points=1)
def exact_where_floats_are_not(answer):
    """Also a number of samples that no float can hold is shared exactly."""
    n = 3 * 10**17 + 45
    expect("the sizes", answer.apportion(n, [1, 2]), [10**17 + 15, 2 * 10**17 + 30])
    expect("the last rank's block", indices(answer.weighted_partition(n, [n - 2, 2], 1)), [n - 2, n - 1])


@test(points=1)
def refuses_impossible_input(answer):
    """A rank outside the world, fewer than no samples or weights that share nothing are a ValueError."""
    expect("the rank's block", indices(answer.weighted_partition(5, [1, 1], 1)), [3, 4])
    for n, weights, rank in [(5, [1, 1], -1), (5, [1, 1], 2), (-1, [1, 1], 0)]:
        refuses(ValueError, answer.weighted_partition, n, weights, rank)
    for weights in ([], [0, 0], [2, -1], [1, float("inf")], [1, float("nan")]):
        refuses(ValueError, answer.apportion, 5, weights)
