"""Tests of strided_partition: the reference deals samples out one by one."""

import itertools

from exercises.conditions import check_conditions
from exercises.partition_run import declare_partition
from exercises.testing import expect, expect_raises, index_list, test

CASES = [(n, world_size) for n in range(12) for world_size in range(1, 7)] + [(100, 7), (3, 40), (1000, 16)]


def dealt(n, world_size):
    """Return the samples of each rank if samples are dealt out in turn."""
    hands = [[] for _ in range(world_size)]
    for i in range(n):
        hands[i % world_size].append(i)
    return hands


@test(points=3)
def divides_evenly(answer):
    """If n is divisible by the world size, every rank gets every world_size-th sample."""
    for each in (1, 2, 5):
        for world_size in (1, 2, 3, 4):
            for rank, hand in enumerate(dealt(each * world_size, world_size)):
                expect(
                    "the rank's samples",
                    index_list(answer.strided_partition(each * world_size, world_size, rank)),
                    hand,
                )


@test(points=3)
def any_sizes(answer):
    """If n is not divisible by the world size, no sample is dropped or repeated."""
    for n, world_size in CASES:
        for rank, hand in enumerate(dealt(n, world_size)):
            expect("the rank's samples", index_list(answer.strided_partition(n, world_size, rank)), hand)


@test(points=1)
def more_ranks_than_samples(answer):
    """With fewer samples than ranks, a rank may get an empty array, not an error."""
    for rank in range(5):
        expect(
            "the samples of 3 on 5 ranks", index_list(answer.strided_partition(3, 5, rank)), [rank] if rank < 3 else []
        )


@test(points=1)
def refuses_impossible_input(answer):
    """An invalid rank, world size or number of samples raises ValueError, whatever the other arguments are."""
    expect("the samples for valid arguments", index_list(answer.strided_partition(5, 2, 1)), [1, 3])
    for n, world_size, rank in itertools.product((5, 2, 1, 0, -1), (2, 1, 0, -1), (0, 1, 2, 5, -1, -2)):
        if n < 0 or rank not in range(world_size):
            expect_raises(ValueError, answer.strided_partition, n, world_size, rank)


def indices_of(n, world_size, rank):
    return dealt(n, world_size)[rank]


ARGUMENTS = {
    "7 samples, rank 1 of 3": (7, 3, 1),
    "no sample": (0, 2, 1),
    "fewer samples than ranks": (2, 5, 4),
    "one rank": (4, 1, 0),
    "20,011 samples, rank 6 of 7": (20_011, 7, 6),
}
DECLARATION = declare_partition(
    lambda answer, n, world_size, rank: answer.strided_partition(n, world_size, rank), indices_of, ARGUMENTS
)


@test(points=1, ranks=(2,))
def holds_under_every_condition(answer, world, network):
    """The result depends on the arguments alone, in every process and order of calls."""
    check_conditions(DECLARATION, answer, world, network)
