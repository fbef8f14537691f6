"""Tests of random_partition: any random order passes that is equal on all ranks."""

import itertools

import numpy as np

from exercises.testing import expect, expect_raises, index_list, test

SIZES = [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (5, 3), (8, 4), (11, 3), (50, 7), (3, 5), (0, 3), (1000, 6)]
LARGE = [10, 100, 1000, 10**4, 10**6, 2**8, 2**16, 2**20, 2**31, 2**32 - 1]


def order(answer, n, world_size, seed, epoch=0):
    """Return the concatenated indices of all ranks."""
    return sum(
        (index_list(answer.random_partition(n, world_size, rank, seed, epoch)) for rank in range(world_size)), []
    )


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
    """Ranks that drew different random numbers before still partition one order."""
    from minidist.comm import all_gather_object

    np.random.seed(1000 + world.rank)  # as after loading different data
    for n in (4, 7, 20):
        mine = index_list(answer.random_partition(n, world.size, world.rank, 5, 1))
        everyone = all_gather_object(mine, network.group)
        case = f"n={n}, world_size={world.size}, each rank in its own process"
        expect("the indices of all ranks, sorted", sorted(sum(everyone, [])), list(range(n)), case=case)


@test(points=2)
def sizes_differ_by_at_most_one(answer):
    """The sizes equal those of block_partition."""
    for n, world_size in SIZES:
        counts = [len(index_list(answer.random_partition(n, world_size, rank, 3))) for rank in range(world_size)]
        expected = [n // world_size + (rank < n % world_size) for rank in range(world_size)]
        expect("the sizes of the parts", counts, expected, case=f"n={n}, world_size={world_size}, seed=3")


@test(points=2)
def seed_and_epoch_decide(answer):
    """The order depends on seed and epoch only: not on the number of ranks, and equal in every call."""
    first = order(answer, 41, 2, 1)
    expect("the order in a second call", order(answer, 41, 2, 1), first)
    for world_size in (1, 3, 4, 7):
        expect(f"the order on {world_size} ranks", order(answer, 41, world_size, 1), first)
    expect("the order without an epoch, which is 0", index_list(answer.random_partition(41, 1, 0, 1)), first)
    seen = {}
    pairs = [(1, 0), *itertools.product(range(13), repeat=2)]
    pairs += [pair for number in LARGE for low in (0, 1) for pair in ((low, number), (number, low))]
    for seed, epoch in dict.fromkeys(pairs):
        got = tuple(order(answer, 41, 1, seed, epoch))
        same = [seen[got]] if got in seen else []
        expect(f"pairs (seed, epoch) that give the order of ({seed}, {epoch})", same, [])
        seen[got] = (seed, epoch)
    expect("the order in a call after all others", order(answer, 41, 2, 1), first)
    mine = answer.random_partition(41, 1, 0, 1)
    index_list(mine)
    if mine.flags.writeable:
        mine[:] = 0
    expect("the order after an earlier result was overwritten", order(answer, 41, 2, 1), first)


@test(points=2)
def order_is_shuffled(answer):
    """The order is shuffled, not rotated: hardly any two neighbours stay adjacent, and each sample gets everywhere."""
    together = 0
    for epoch in range(20):
        got = order(answer, 50, 1, 3, epoch)
        together += sum(abs(a - b) == 1 for a, b in zip(got, got[1:], strict=False))
    # A fair order leaves 2 of 50 pairs together: 39 of the 980 pairs are expected, the spread is 6.
    expect("at most 100 of 980 pairs of neighbours are still adjacent", together <= 100, True, case=f"{together} were")
    # One of 200 fair orders has a given sample at a given position with a chance of 1 - 0.8**200.
    for what, pairs in (
        ("epochs of one seed", [(3, each) for each in range(200)]),
        ("seeds", [(each, 0) for each in range(200)]),
    ):
        orders = [order(answer, 5, 1, *pair) for pair in pairs]
        for position, seen in enumerate(zip(*orders, strict=True)):
            expect(f"the samples at position {position} of 5, in 200 {what}", sorted(set(seen)), [0, 1, 2, 3, 4])


@test(points=1)
def keeps_the_global_generator(answer):
    """numpy's global generator keeps its state: other code draws from it, too."""
    np.random.seed(0)
    expected = np.random.RandomState(0).rand(3)
    index_list(answer.random_partition(20, 2, 0, 9))
    expect("the next three numbers of numpy.random", np.random.rand(3), expected)


@test(points=1)
def refuses_impossible_input(answer):
    """An invalid rank, world size or number of samples raises ValueError, whatever the other arguments are."""
    expect("the number of samples for valid arguments", len(index_list(answer.random_partition(5, 2, 1, 0))), 2)
    for n, world_size, rank in itertools.product((5, 2, 1, 0, -1), (2, 1, 0, -1), (0, 1, 2, 5, -1, -2)):
        if n < 0 or rank not in range(world_size):
            expect_raises(ValueError, answer.random_partition, n, world_size, rank, 0)
