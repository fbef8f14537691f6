"""Tests of block_partition: the reference deals samples out one by one."""

import itertools

from exercises.testing import expect, expect_raises, index_list, test

CASES = [(n, world_size) for n in range(12) for world_size in range(1, 7)] + [(100, 7), (3, 40), (1000, 16)]


def dealt(n, world_size):
    """Return the number of samples per rank if samples are dealt out in turn."""
    counts = [0] * world_size
    for i in range(n):
        counts[i % world_size] += 1
    return counts


@test(points=2)
def divides_evenly(answer):
    """If n is divisible by the world size, every rank gets a consecutive block of equal size."""
    for each in (1, 2, 5):
        for world_size in (1, 2, 3, 4):
            for rank in range(world_size):
                got = index_list(answer.block_partition(each * world_size, world_size, rank))
                expect("a block of equal size", got, list(range(rank * each, rank * each + each)))


@test(points=3)
def each_index_once(answer):
    """Every sample belongs to exactly one rank, whatever the sizes."""
    for n, world_size in CASES:
        parts = [index_list(answer.block_partition(n, world_size, rank)) for rank in range(world_size)]
        case = f"n={n}, world_size={world_size}, all ranks"
        expect("the concatenated blocks of all ranks", sum(parts, []), list(range(n)), case=case)


@test(points=3)
def sizes_differ_by_at_most_one(answer):
    """Block sizes differ by at most one, and the longer blocks come first."""
    for n, world_size in CASES:
        counts = [len(index_list(answer.block_partition(n, world_size, rank))) for rank in range(world_size)]
        expect("the sizes of the blocks", counts, dealt(n, world_size), case=f"n={n}, world_size={world_size}")


@test(points=1)
def more_ranks_than_samples(answer):
    """With fewer samples than ranks, a rank may get an empty array, not an error."""
    for rank in range(5):
        expect(
            "the block of 3 samples on 5 ranks",
            index_list(answer.block_partition(3, 5, rank)),
            [rank] if rank < 3 else [],
        )


@test(points=1)
def refuses_impossible_input(answer):
    """An invalid rank, world size or number of samples raises ValueError, whatever the other arguments are."""
    expect("the block for valid arguments", index_list(answer.block_partition(5, 2, 1)), [3, 4])
    for n, world_size, rank in itertools.product((5, 2, 1, 0, -1), (2, 1, 0, -1), (0, 1, 2, 5, -1, -2)):
        if n < 0 or rank not in range(world_size):
            expect_raises(ValueError, answer.block_partition, n, world_size, rank)
