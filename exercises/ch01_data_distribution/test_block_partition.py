"""Tests of block_partition: the reference deals samples out one by one."""

from exercises.testing import expect, indices, refuses, test

CASES = [(n, world_size) for n in range(12) for world_size in range(1, 7)] + [(100, 7), (3, 40), (1000, 16)]


def dealt(n, world_size):
    """How many samples each rank gets when they are dealt out in turn."""
    counts = [0] * world_size
    for i in range(n):
        counts[i % world_size] += 1
    return counts


@test(points=2)
def divides_evenly(answer):
    """When the ranks divide the samples, each has an equal consecutive block."""
    for each in (1, 2, 5):
        for world_size in (1, 2, 3, 4):
            for rank in range(world_size):
                got = indices(answer.block_partition(each * world_size, world_size, rank))
                expect("a block of equal size", got, list(range(rank * each, rank * each + each)))


@test(points=3)
def each_index_once(answer):
    """Every sample belongs to exactly one rank, whatever the sizes."""
    for n, world_size in CASES:
        parts = [indices(answer.block_partition(n, world_size, rank)) for rank in range(world_size)]
        case = f"n={n}, world_size={world_size}, all ranks"
        expect("all blocks one after the other", sum(parts, []), list(range(n)), case=case)


@test(points=3)
def sizes_differ_by_at_most_one(answer):
    """No rank has two samples more than another, and the longer blocks come first."""
    for n, world_size in CASES:
        counts = [len(indices(answer.block_partition(n, world_size, rank))) for rank in range(world_size)]
        expect("the sizes of the blocks", counts, dealt(n, world_size), case=f"n={n}, world_size={world_size}")


@test(points=1)
def more_ranks_than_samples(answer):
    """A rank without samples has an empty array, not an error."""
    for rank in range(5):
        expect("one sample or none", indices(answer.block_partition(3, 5, rank)), [rank] if rank < 3 else [])


@test(points=1)
def refuses_impossible_input(answer):
    """A rank outside the world, no ranks or fewer than no samples is a ValueError."""
    expect("a block of possible input", indices(answer.block_partition(5, 2, 1)), [3, 4])
    for n, world_size, rank in [(5, 2, 2), (5, 2, -1), (5, 0, 0), (-1, 2, 0)]:
        refuses(ValueError, answer.block_partition, n, world_size, rank)
