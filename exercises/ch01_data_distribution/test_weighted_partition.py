"""Tests of weighted_partition: the reference computes the largest remainder with integers."""

import itertools
import math
import numbers
import random

from exercises.conditions import check_conditions
from exercises.partition_run import declare_partition
from exercises.testing import Wrong, expect, expect_raises, index_list, show, test

WEIGHTS = [[1], [1, 1], [1, 2], [3, 1], [1, 1, 1], [1, 2, 3], [5, 0, 2], [0, 1], [8, 16, 26], [7, 7, 7, 1], [1, 100]]


def shares(n, weights):
    """Return the largest-remainder sizes, one leftover sample at a time."""
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = math.lcm(*(denominator for _, denominator in ratios))
    weights = [numerator * (common // denominator) for numerator, denominator in ratios]
    total = sum(weights)
    whole = [n * w // total for w in weights]
    left = [n * w % total for w in weights]
    while sum(whole) < n:
        first = left.index(max(left))
        whole[first] += 1
        left[first] = -1
    return whole


def sizes_of(answer, n, weights):
    """Return the result of apportion. Raises Wrong unless it is a list of integers."""
    got = answer.apportion(n, weights)
    if type(got) is not list or not all(isinstance(size, numbers.Integral) for size in got):
        raise Wrong("type", "the result has the wrong type", "a list of integers", f"{type(got).__name__} {show(got)}")
    return got


@test(points=3)
def integer_shares(answer):
    """If every exact share is an integer, each rank gets its exact share."""
    for weights in WEIGHTS:
        for times in (0, 1, 3):
            expect("the sizes", sizes_of(answer, sum(weights) * times, weights), [w * times for w in weights])


@test(points=3)
def sizes_sum_to_n(answer):
    """The sizes sum to n, and each is within one of its exact share."""
    for weights in WEIGHTS:
        for n in range(15):
            got, total = answer.apportion(n, weights), sum(weights)
            expect("the sum of the sizes", sum(got), n)
            near = [abs(size * total - n * w) < total for size, w in zip(got, weights, strict=True)]
            expect(f"whether the sizes {got} are within one of the exact shares", near, [True] * len(weights))


@test(points=3)
def largest_remainder(answer):
    """Leftover samples go to the largest fractional parts; ties go to the lower rank."""
    for weights in WEIGHTS:
        for n in range(15):
            expect("the sizes", sizes_of(answer, n, weights), shares(n, weights))
    for ranks in (2, 3, 4):
        for weights in itertools.product(range(4 if ranks < 4 else 2), repeat=ranks):
            for n in (0, 1, 2, 3, 5, 7) if any(weights) else ():
                expect("the sizes", sizes_of(answer, n, list(weights)), shares(n, weights))


@test(points=2)
def consecutive_blocks(answer):
    """The block of rank i starts where the block of rank i - 1 ends."""
    for weights in WEIGHTS:
        for n in (0, 1, 5, 13):
            expected, start = [], 0
            for size in shares(n, weights):
                expected.append(list(range(start, start + size)))
                start += size
            for rank, block in enumerate(expected):
                expect("the rank's block", index_list(answer.weighted_partition(n, weights, rank)), block)


@test(points=1)
def fractions_of_one(answer):
    """Weights need not be integers."""
    expect("the sizes", answer.apportion(10, [0.5, 0.25, 0.25]), [5, 3, 2])
    expect("the sizes", answer.apportion(7, [0.1, 0.1, 0.1]), [3, 2, 2])
    expect("the sizes", answer.apportion(1003, [0.501, 0.502]), [501, 502])
    expect("the sizes", answer.apportion(9, [0.001, 0.002]), [3, 6])
    expect("the sizes", answer.apportion(10, [1.5, 1.0]), [6, 4])
    expect("the sizes", answer.apportion(8 * 10**10, [0.1, 0.7]), [10**10, 7 * 10**10])
    expect("the sizes", answer.apportion(10, [2.0**-20, 3 * 2.0**-20]), [3, 7])  # 2.5 and 7.5: the tie goes to rank 0
    draw = random.Random(0)
    kinds = (draw.random, lambda: draw.randrange(8) / 4, lambda: draw.choice((0, 1, 2, 0.1, 0.7, 1e-30, 1e300)))
    for number in range(60):
        weights = [kinds[number % 3]() for _ in range(draw.randrange(1, 6))] + [0.3]
        for n in (draw.randrange(1, 20), draw.randrange(10**6)):
            expect("the sizes", sizes_of(answer, n, weights), shares(n, weights))
    for weights in ([1e308, 1e308, 1e308], [5e-324, 1e308], [5e-324, 5e-324]):  # the largest and the smallest floats
        expect("the sizes", sizes_of(answer, 5, weights), shares(5, weights))


@test(points=1)
def exact_beyond_floats(answer):
    """The sizes are exact also if a float cannot represent the number of samples, or the weights."""
    n = 3 * 10**17 + 45
    expect("the sizes", answer.apportion(n, [1, 2]), [10**17 + 15, 2 * 10**17 + 30])
    expect("the last rank's block", index_list(answer.weighted_partition(n, [n - 2, 2], 1)), [n - 2, n - 1])
    expect("the rank's block", index_list(answer.weighted_partition(n, [n - 5, 3, 2], 1)), [n - 5, n - 4, n - 3])
    for n in (1, 2, 3, 10**17 + 7):
        for weights in ([10**17, 10**17 + 1], [10**17 + 1, 10**17], [10**17, 10**17 + 2, 10**17 + 1]):
            expect("the sizes", sizes_of(answer, n, weights), shares(n, weights))
    draw = random.Random(1)
    for _ in range(40):
        weights = [draw.randrange(10**18) for _ in range(draw.randrange(1, 6))]
        n = draw.randrange(10 ** draw.randrange(1, 18))
        expect("the sizes", sizes_of(answer, n, weights), shares(n, weights))


@test(points=1)
def refuses_impossible_input(answer):
    """An invalid rank, number of samples or list of weights raises ValueError, whatever the other arguments are."""
    expect("the rank's block", index_list(answer.weighted_partition(5, [1, 1], 1)), [3, 4])
    for n, weights, rank in itertools.product((5, 1, 0, -1), ([1, 1], [2]), (-1, -2, 0, 1, 2)):
        if n < 0 or rank not in range(len(weights)):
            expect_raises(ValueError, answer.weighted_partition, n, weights, rank)
    for n in (5, 1, 0):
        for weights in ([], [0], [0, 0], [2, -1], [1, math.inf], [1, -math.inf], [math.inf, -math.inf], [1, math.nan]):
            expect_raises(ValueError, answer.apportion, n, weights)
            expect_raises(ValueError, answer.weighted_partition, n, weights, 0)
    expect_raises(ValueError, answer.apportion, -1, [1, 1])


def indices_of(n, weights, rank):
    begin = sum(shares(n, weights)[:rank])
    return list(range(begin, begin + shares(n, weights)[rank]))


ARGUMENTS = {
    "7 samples, weights 1, 2 and 3, rank 1": (7, [1, 2, 3], 1),
    "no sample": (0, [1, 1], 1),
    "a weight of 0": (5, [1, 0, 2], 1),
    "one rank": (4, [3], 0),
    "20,011 samples": (20_011, [7, 7, 7, 1], 3),
}
DECLARATION = declare_partition(
    lambda answer, n, weights, rank: answer.weighted_partition(n, weights, rank), indices_of, ARGUMENTS
)


@test(points=1, ranks=(2,))
def holds_under_every_condition(answer, world, network):
    """The result depends on the arguments alone, in every process and order of calls; `weights` does not change."""
    check_conditions(DECLARATION, answer, world, network)
