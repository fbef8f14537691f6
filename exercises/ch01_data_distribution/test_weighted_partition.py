"""Tests of weighted_partition: the reference computes the largest remainder with integers."""

from exercises.conditions import check_conditions
from exercises.partition_run import declare_partition
from exercises.testing import expect, expect_raises, index_list, test

WEIGHTS = [[1], [1, 1], [1, 2], [3, 1], [1, 1, 1], [1, 2, 3], [5, 0, 2], [0, 1], [8, 16, 26], [7, 7, 7, 1], [1, 100]]


def shares(n, weights):
    """Return the largest-remainder sizes for integer weights, one leftover sample at a time."""
    total = sum(weights)
    whole = [n * w // total for w in weights]
    left = [n * w % total for w in weights]
    while sum(whole) < n:
        first = left.index(max(left))
        whole[first] += 1
        left[first] = -1
    return whole


@test(points=3)
def integer_shares(answer):
    """If every exact share is an integer, each rank gets its exact share."""
    for weights in WEIGHTS:
        for times in (0, 1, 3):
            expect("the sizes", answer.apportion(sum(weights) * times, weights), [w * times for w in weights])


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
            expect("the sizes", answer.apportion(n, weights), shares(n, weights))


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


@test(points=1)
def exact_beyond_floats(answer):
    """The sizes are exact also if a float cannot represent the number of samples."""
    n = 3 * 10**17 + 45
    expect("the sizes", answer.apportion(n, [1, 2]), [10**17 + 15, 2 * 10**17 + 30])
    expect("the last rank's block", index_list(answer.weighted_partition(n, [n - 2, 2], 1)), [n - 2, n - 1])


@test(points=1)
def refuses_impossible_input(answer):
    """An invalid rank, number of samples or list of weights raises ValueError."""
    expect("the rank's block", index_list(answer.weighted_partition(5, [1, 1], 1)), [3, 4])
    for n, weights, rank in [(5, [1, 1], -1), (5, [1, 1], 2), (-1, [1, 1], 0)]:
        expect_raises(ValueError, answer.weighted_partition, n, weights, rank)
    for weights in ([], [0, 0], [2, -1], [1, float("inf")], [1, float("nan")]):
        expect_raises(ValueError, answer.apportion, 5, weights)


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
