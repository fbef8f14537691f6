"""Tests of all_reduce_time: times compared with rounds added one by one."""

import math

from exercises.testing import expect, expect_raises, test

SIZES = (*range(1, 34), 48, 63, 64, 65, 100, 1000, 1024, 1025)
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
    expected = math.fsum(latency_s + sent / bytes_per_s for sent in rounds_of(num_ranks, num_bytes))
    case = f"time_s({algorithm!r}, {num_ranks}, {num_bytes}, {latency_s}, {bytes_per_s})"
    expect("the seconds", got, expected, case=case, tolerance=1e-15 + 1e-11 * expected)


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
        for num_ranks in (1, 2, 3, 4, 6, 7):
            for num_bytes in (0, 1, 1_000_001, 2.5e12):
                for latency_s, bytes_per_s in ((LATENCY_S, BYTES_PER_S), (0.0, BYTES_PER_S), (1e-3, 1e6), (2, 1)):
                    expect_time(answer, algorithm, rounds_of, num_ranks, num_bytes, latency_s, bytes_per_s)


@test(points=1)
def unknown_names(answer):
    """Any other algorithm is a ValueError, also on one rank."""
    names = ("star", "halving", "", "rings", "trees", "Ring", "TREE", " doubling", "tre", "halving_doubling")
    for num_ranks in (1, 4, 6):
        for name in names:
            for num_bytes in (0, 1000):
                expect_raises(ValueError, answer.time_s, name, num_ranks, num_bytes, 1e-3, 1e9)
