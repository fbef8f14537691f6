"""Tests of random_partition: any random order is right that all ranks share."""

import numpy as np

from exercises.testing import expect, indices, refuses, test

SIZES = [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (5, 3), (8, 4), (11, 3), (50, 7), (3, 5)]


def order(answer, n, world_size, seed, epoch=0):
    """The indices of all ranks, one after the other."""
    return sum((indices(answer.random_partition(n, world_size, rank, seed, epoch)) for rank in range(world_size)), [])


@test(points=2)
def each_index_once(answer):
    """Every sample belongs to exactly one rank."""
    for n, world_size in SIZES:
        for seed, epoch in [(0, 0), (7, 3)]:
            case = f"n={n}, world_size={world_size}, all ranks"
            got = sorted(order(answer, n, world_size, seed, epoch))
            expect("the indices of all ranks, sorted", got, list(range(n)), case=case)


@test(points=2, ranks=(4,))
def ranks_share_one_order(answer, world, network):
    """Ranks that drew other random numbers before still cut the same order."""
    from minidist.comm import all_gather_object

    np.random.seed(1000 + world.rank)  # as after loading different data
    for n in (4, 7, 20):
        mine = indices(answer.random_partition(n, world.size, world.rank, 5, 1))
        everyone = all_gather_object(mine, network.group)
        case = f"n={n}, world_size={world.size}, each rank in its own process"
        expect("the indices of all ranks, sorted", sorted(sum(everyone, [])), list(range(n)), case=case)


@test(points=2)
def sizes_differ_by_at_most_one(answer):
    """The sizes are those of consecutive blocks."""
    for n, world_size in SIZES:
        counts = [len(indices(answer.random_partition(n, world_size, rank, 3))) for rank in range(world_size)]
        expected = [n // world_size + (rank < n % world_size) for rank in range(world_size)]
        expect("the sizes of the parts", counts, expected, case=f"n={n}, world_size={world_size}, seed=3")


@test(points=2)
def seed_and_epoch_decide(answer):
    """The same seed and epoch give the same order again, others give another one, on any number of ranks."""
    first = order(answer, 40, 2, 1)
    expect("the same order again", order(answer, 40, 2, 1), first)
    expect("the same order on four ranks", order(answer, 40, 4, 1), first)
    seen = {(1, 0): first}
    for seed, epoch in [(1, 1), (2, 0), (1, 100), (101, 0)]:
        got = order(answer, 40, 2, seed, epoch)
        same = [pair for pair, other in seen.items() if got == other]
        expect(f"other pairs (seed, epoch) with the order of ({seed}, {epoch})", same, [])
        seen[seed, epoch] = got


@test(points=2)
def neighbours_part(answer):
    """The order is mixed, not cut and turned: in 20 epochs hardly any two neighbours stay together."""
    together = 0
    for epoch in range(20):
        got = order(answer, 50, 1, 3, epoch)
        together += sum(abs(a - b) == 1 for a, b in zip(got, got[1:], strict=False))
    # A fair order leaves 2 of 50 pairs together: 39 of the 980 pairs are expected, the spread is 6.
    expect("at most 100 of 980 neighbours are still together", together <= 100, True, case=f"{together} were")


@test(points=1)
def leaves_other_random_numbers_alone(answer):
    """The global generator of numpy is as it was: others draw from it too."""
    np.random.seed(0)
    expected = np.random.RandomState(0).rand(3)
    indices(answer.random_partition(20, 2, 0, 9))
    expect("the next three numbers of numpy.random", np.random.rand(3), expected)


@test(points=1)
def refuses_impossible_input(answer):
    """A rank outside the world, no ranks or fewer than no samples is a ValueError."""
    expect("how many samples of possible input", len(indices(answer.random_partition(5, 2, 1, 0))), 2)
    for n, world_size, rank in [(5, 2, -1), (5, 2, 2), (5, 0, 0), (-1, 2, 0)]:
        refuses(ValueError, answer.random_partition, n, world_size, rank, 0)
