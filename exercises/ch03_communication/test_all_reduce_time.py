"""Tests of all_reduce_time: times compared with rounds added one by one."""

from exercises.testing import expect, expect_raises, test

SIZES = range(1, 10)
LATENCY_S, BYTES_PER_S = 2.0**-10, 2.0**30


def tree_rounds(num_ranks, num_bytes):
    """Return the bytes that a rank sends in each round: up a tree and down, the full tensor in each round."""
    rounds, have = [], 1
    while have < num_ranks:
        rounds, have = [*rounds, num_bytes, num_bytes], 2 * have
    return rounds


def ring_rounds(num_ranks, num_bytes):
    """Return the bytes that a rank sends in each round: one chunk, in two halves."""
    return [num_bytes / num_ranks for _ in range(2) for _ in range(num_ranks - 1)]


def doubling_rounds(num_ranks, num_bytes):
    """Return the bytes of each round on the slowest rank: half of what is left, the same back, and the folding."""
    rounds, have, part = [], 1, num_bytes
    while 2 * have <= num_ranks:
        have, part = 2 * have, part / 2
        rounds += [part, part]
    return rounds if have == num_ranks else [*rounds, num_bytes, num_bytes]


def expect_time(answer, algorithm, rounds_of, num_ranks, num_bytes, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S):
    got = answer.time_s(algorithm, num_ranks, num_bytes, latency_s, bytes_per_s)
    expected = float(sum(latency_s + sent / bytes_per_s for sent in rounds_of(num_ranks, num_bytes)))
    case = f"time_s({algorithm!r}, {num_ranks}, {num_bytes}, {latency_s}, {bytes_per_s})"
    expect("the seconds", got, expected, case=case, tolerance=1e-12)


@test(points=3)
def time_of_a_tree(answer):
    """Tree: ceil(log2(ranks)) rounds up and as many down, the full tensor in each."""
    for num_ranks in SIZES:
        expect_time(answer, "tree", tree_rounds, num_ranks, 7_200_000)


@test(points=3)
def time_of_a_ring(answer):
    """Ring: two halves of ranks - 1 rounds, one chunk in each."""
    for num_ranks in SIZES:
        expect_time(answer, "ring", ring_rounds, num_ranks, 7_200_000)


@test(points=3)
def time_of_doubling(answer):
    """Halving and doubling: halves, quarters, ... and back; the full tensor twice more if ranks are folded."""
    for num_ranks in SIZES:
        expect_time(answer, "doubling", doubling_rounds, num_ranks, 7_200_000)


@test(points=2)
def latency_and_bandwidth_apart(answer):
    """An empty tensor costs its rounds' latencies, and without latency only the bytes count."""
    for algorithm, rounds_of in (("tree", tree_rounds), ("ring", ring_rounds), ("doubling", doubling_rounds)):
        for num_ranks in (3, 4):
            expect_time(answer, algorithm, rounds_of, num_ranks, 0)
            expect_time(answer, algorithm, rounds_of, num_ranks, 1_000_001, 0.0)
            expect_time(answer, algorithm, rounds_of, num_ranks, 1_000_001, 1e-3, 1e6)


@test(points=1)
def unknown_names(answer):
    """Any other algorithm is a ValueError, also on one rank."""
    for num_ranks in (1, 4):
        for name in ("star", "halving", "", "rings"):
            expect_raises(ValueError, answer.time_s, name, num_ranks, 1000, 1e-3, 1e9)
