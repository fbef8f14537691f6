"""Tests of cost_formula: the counts, against rounds that are acted out one by one."""

from exercises.testing import Wrong, expect, show, test

SIZES = (2, 3, 4, 5, 8, 9)
N = 7200.0  # bytes; divides by every number of ranks up to 10 but 7


def tree(size, n, reduced):
    """[rounds, bytes sent, bytes reduced] of a tree: those who have the tensor double until all of them do."""
    rounds, have = 0, 1
    while have < size:
        rounds, have = rounds + 1, 2 * have
    return [rounds, rounds * n, rounds * n * reduced]


def ring(size, n, reduced):
    """[rounds, bytes sent, bytes reduced] of a ring: each rank hands on one part per round."""
    counts = [0, 0.0, 0.0]
    for _ in range(size - 1):
        counts = [counts[0] + 1, counts[1] + n / size, counts[2] + n / size * reduced]
    return counts


def counts(answer, name, algorithm, size, n=N):
    found = answer.collective_cost(name, algorithm, size, n)
    if not all(hasattr(found, count) for count in ("rounds", "sent", "reduced")):
        raise Wrong("type", "the result has the wrong type", "a Cost", f"{type(found).__name__} {show(found)}")
    return [found.rounds, found.sent, found.reduced]


def same(got, expected, case):
    expect("[rounds, bytes sent, bytes reduced] of the slowest chain", got, expected, case=case, tolerance=1e-6)


@test(points=3)
def a_tree_down(answer):
    """Broadcast along a tree: as many rounds as doublings, the whole row in each, nothing added up."""
    for size in SIZES:
        same(counts(answer, "broadcast", "tree", size), tree(size, N, 0), f"{size} ranks, {N:g} bytes")


@test(points=3)
def once_round_the_ring(answer):
    """Reduce-scatter: size - 1 rounds of one part, and each is added up."""
    for size in SIZES:
        same(counts(answer, "reduce_scatter", "ring", size), ring(size, N, 1), f"{size} ranks, {N:g} bytes")


@test(points=3)
def twice_round_the_ring(answer):
    """All-reduce on a ring: once round with adding up, once without."""
    for size in SIZES:
        expected = [a + b for a, b in zip(ring(size, N, 1), ring(size, N, 0), strict=True)]
        same(counts(answer, "all_reduce", "ring", size), expected, f"{size} ranks, {N:g} bytes")


@test(points=2)
def up_a_tree_and_down(answer):
    """All-reduce on a tree: up with adding up, down without."""
    for size in SIZES:
        expected = [a + b for a, b in zip(tree(size, N, 1), tree(size, N, 0), strict=True)]
        same(counts(answer, "all_reduce", "tree", size), expected, f"{size} ranks, {N:g} bytes")


@test(points=2)
def any_row(answer):
    """The bytes grow with the row, the rounds do not; a row of nothing still costs its rounds."""
    for n in (0.0, 1.0, 3 * N):
        same(counts(answer, "all_reduce", "ring", 3, n), [4, 4 * n / 3, 2 * n / 3], f"3 ranks, {n:g} bytes")
        same(counts(answer, "broadcast", "tree", 6, n), [3, 3 * n, 0], f"6 ranks, {n:g} bytes")
