"""Tests of cost_formula: the counts, compared with rounds simulated one by one."""

from exercises.testing import Wrong, expect, expect_raises, show, test

SIZES = (2, 3, 4, 5, 8, 9)
N = 7200.0  # bytes; divisible by every number of ranks up to 10 except 7


def tree(size, n, reduced):
    """[rounds, bytes sent, bytes reduced] of a tree: the number of ranks with the tensor doubles in each round."""
    rounds, have = 0, 1
    while have < size:
        rounds, have = rounds + 1, 2 * have
    return [rounds, rounds * n, rounds * n * reduced]


def ring(size, n, reduced):
    """[rounds, bytes sent, bytes reduced] of a ring: each rank sends one chunk per round."""
    counts = [0, 0.0, 0.0]
    for _ in range(size - 1):
        counts = [counts[0] + 1, counts[1] + n / size, counts[2] + n / size * reduced]
    return counts


def counts(answer, name, algorithm, size, n=N):
    found = answer.collective_cost(name, algorithm, size, n)
    if not all(hasattr(found, count) for count in ("num_rounds", "sent_bytes", "reduced_bytes")):
        raise Wrong("type", "the result has the wrong type", "a Cost", f"{type(found).__name__} {show(found)}")
    return [found.num_rounds, found.sent_bytes, found.reduced_bytes]


def expect_counts(got, expected, case):
    expect("[rounds, bytes sent, bytes reduced] on the critical path", got, expected, case=case, tolerance=1e-6)


@test(points=3)
def cost_of_tree_broadcast(answer):
    """Tree broadcast: ceil(log2(group_size)) rounds, the full tensor in each, no additions."""
    for size in SIZES:
        expect_counts(counts(answer, "broadcast", "tree", size), tree(size, N, 0), f"{size} ranks, {N:g} bytes")


@test(points=3)
def cost_of_ring_reduce_scatter(answer):
    """Ring reduce-scatter: size - 1 rounds of one chunk, each followed by an addition."""
    for size in SIZES:
        expect_counts(counts(answer, "reduce_scatter", "ring", size), ring(size, N, 1), f"{size} ranks, {N:g} bytes")


@test(points=3)
def cost_of_ring_all_reduce(answer):
    """Ring all-reduce: size - 1 rounds with additions, then size - 1 rounds without."""
    for size in SIZES:
        expected = [a + b for a, b in zip(ring(size, N, 1), ring(size, N, 0), strict=True)]
        expect_counts(counts(answer, "all_reduce", "ring", size), expected, f"{size} ranks, {N:g} bytes")


@test(points=2)
def cost_of_tree_all_reduce(answer):
    """Tree all-reduce: up the tree with additions, down without."""
    for size in SIZES:
        expected = [a + b for a, b in zip(tree(size, N, 1), tree(size, N, 0), strict=True)]
        expect_counts(counts(answer, "all_reduce", "tree", size), expected, f"{size} ranks, {N:g} bytes")


@test(points=2)
def cost_by_tensor_size(answer):
    """The bytes grow with the tensor, the rounds do not; an empty tensor still costs its rounds."""
    for n in (0.0, 1.0, 3 * N):
        expect_counts(counts(answer, "all_reduce", "ring", 3, n), [4, 4 * n / 3, 2 * n / 3], f"3 ranks, {n:g} bytes")
        expect_counts(counts(answer, "broadcast", "tree", 6, n), [3, 3 * n, 0], f"6 ranks, {n:g} bytes")


def flat(size, n, reduced):
    """[rounds, bytes sent, bytes reduced]: one full tensor after the other through the busiest link."""
    counts = [0, 0.0, 0.0]
    for _ in range(size - 1):
        counts = [counts[0] + 1, counts[1] + n, counts[2] + n * reduced]
    return counts


@test(points=3)
def cost_of_the_others(answer):
    """Flat algorithms, tree reduce, ring all-gather, all-to-all, naive all-reduce, parameter server."""
    for size in SIZES:
        step = [a + b for a, b in zip(flat(size, N, 1), flat(size, N, 0), strict=True)]
        for name, algorithm, expected in (
            ("broadcast", "flat", flat(size, N, 0)),
            ("reduce", "flat", flat(size, N, 1)),
            ("reduce", "tree", tree(size, N, 1)),
            ("all_gather", "ring", ring(size, N, 0)),
            ("all_to_all", "pairwise", ring(size, N, 0)),
            ("all_reduce", "naive", flat(size, N, 1)),
            ("parameter_server_step", "flat", step),
        ):
            expect_counts(counts(answer, name, algorithm, size), expected, f"{name} {algorithm}, {size} ranks")


# Rounds, bytes sent and bytes reduced for 1200 bytes: [4 ranks, 6 ranks]. 6 ranks are 4 active ones and 2 folded ones.
DOUBLING = {
    ("all_gather", "doubling"): [[2, 900, 0], [5, 2400, 0]],
    ("reduce_scatter", "halving"): [[2, 900, 900], [4, 2600, 2400]],
    ("all_reduce", "doubling"): [[2, 2400, 2400], [4, 4800, 3600]],
    ("all_reduce", "rabenseifner"): [[4, 1800, 900], [6, 4200, 2100]],
}


@test(points=1)
def one_rank_unknown_names_and_halving(answer):
    """One rank costs nothing, an unknown algorithm is a ValueError, and the doubling algorithms have their cost."""
    for name, algorithm in (("broadcast", "tree"), ("all_reduce", "ring"), ("all_reduce", "rabenseifner")):
        expect_counts(counts(answer, name, algorithm, 1), [0, 0, 0], f"{name} {algorithm}, 1 rank")
    for (name, algorithm), expected in DOUBLING.items():
        for size, each in zip((4, 6), expected, strict=True):
            expect_counts(counts(answer, name, algorithm, size, 1200), each, f"{name} {algorithm}, {size} ranks")
    for unknown in (("broadcast", "ring"), ("scatter", "flat")):
        for size in (4, 1):
            expect_raises(ValueError, answer.collective_cost, *unknown, size, 1000)
