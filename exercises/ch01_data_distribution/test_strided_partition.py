"""Tests of strided_partition: the reference deals samples out one by one."""

from exercises.testing import expect, indices, refuses, test

CASES = [(n, world_size) for n in range(12) for world_size in range(1, 7)] + [(100, 7), (3, 40), (1000, 16)]


def dealt(n, world_size):
    """The samples of each rank when they are dealt out in turn."""
    hands = [[] for _ in range(world_size)]
    for i in range(n):
        hands[i % world_size].append(i)
    return hands


@test(points=3)
def divides_evenly(answer):
    """When the ranks divide the samples, each has every world_size-th one."""
    for each in (1, 2, 5):
        for world_size in (1, 2, 3, 4):
            for rank, hand in enumerate(dealt(each * world_size, world_size)):
                expect(
                    "the rank's samples", indices(answer.strided_partition(each * world_size, world_size, rank)), hand
                )


@test(points=3)
def any_sizes(answer):
    """Nothing is dropped and nothing repeated when the ranks do not divide the samples."""
    for n, world_size in CASES:
        for rank, hand in enumerate(dealt(n, world_size)):
            expect("the rank's samples", indices(answer.strided_partition(n, world_size, rank)), hand)


@test(points=1)
def more_ranks_than_samples(answer):
    """A rank without samples has an empty array, not an error."""
    for rank in range(5):
        expect("one sample or none", indices(answer.strided_partition(3, 5, rank)), [rank] if rank < 3 else [])


@test(points=1)
def refuses_impossible_input(answer):
    """A rank outside the world, no ranks or fewer than no samples is a ValueError."""
    expect("the samples of possible input", indices(answer.strided_partition(5, 2, 1)), [1, 3])
    for n, world_size, rank in [(5, 2, 2), (5, 2, -1), (5, 0, 0), (-1, 2, 0)]:
        refuses(ValueError, answer.strided_partition, n, world_size, rank)
