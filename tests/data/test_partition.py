"""Partitions: every sample on exactly one rank, documented sizes, equal on every machine."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.data import partition
from minidist.hashing import hash64

sizes = st.integers(0, 300)
worlds = st.integers(1, 40)  # often more ranks than samples
seeds = st.integers(-(2**70), 2**70)
weight_lists = st.lists(st.one_of(st.just(0), st.integers(0, 50), st.floats(0, 1e300)), min_size=1, max_size=12).filter(
    any
)
quick = settings(max_examples=100, deadline=None)

PINNED = [2, 9, 7, 0, 5, 1, 4, 3, 8, 6], [6, 8, 5, 1, 0, 4, 9, 3, 2, 7]  # epochs 0 and 1 of seed 1
PARTITIONS = {
    "block": partition.block_partition,
    "strided": partition.strided_partition,
    "random": lambda n, world_size, rank: partition.random_partition(n, world_size, rank, seed=3),
}


def parts_of(kind, n, world_size):
    return [PARTITIONS[kind](n, world_size, rank) for rank in range(world_size)]


@pytest.mark.parametrize("kind", PARTITIONS)
@quick
@given(n=sizes, world_size=worlds)
def test_each_sample_belongs_to_exactly_one_rank(kind, n, world_size):
    parts = parts_of(kind, n, world_size)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert all(part.dtype == np.int64 for part in parts)


@pytest.mark.parametrize("kind", PARTITIONS)
@quick
@given(n=sizes, world_size=worlds)
def test_sizes_differ_by_at_most_one(kind, n, world_size):
    lengths = [part.size for part in parts_of(kind, n, world_size)]
    assert max(lengths) - min(lengths) <= 1


def test_block_is_consecutive_and_strided_is_interleaved():
    assert [p.tolist() for p in parts_of("block", 7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [p.tolist() for p in parts_of("strided", 7, 3)] == [[0, 3, 6], [1, 4], [2, 5]]


@quick
@given(n=sizes, weights=weight_lists)
def test_weighted_gives_each_sample_once_and_nothing_to_weight_zero(n, weights):
    parts = [partition.weighted_partition(n, weights, rank) for rank in range(len(weights))]
    assert np.concatenate(parts).tolist() == list(range(n))
    assert all(part.size == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)


@quick
@given(n=sizes, weights=st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_weighted_shares_are_within_one_of_the_exact_share(n, weights):
    for share, weight in zip(partition.apportion(n, weights), weights, strict=True):
        assert abs(share * sum(weights) - n * weight) < sum(weights)  # in whole numbers: no rounding


@quick
@given(n=sizes, world_size=worlds)
def test_equal_weights_are_blocks(n, world_size):
    for rank in range(world_size):
        assert np.array_equal(
            partition.weighted_partition(n, [0.1] * world_size, rank), partition.block_partition(n, world_size, rank)
        )


def test_largest_remainder_decides_who_gets_the_rest():
    # Quotas of 10 samples: 1.6, 3.2, 5.2. Floors leave one sample, and 0.6 is the largest remainder.
    assert partition.apportion(10, [8, 16, 26]) == [2, 3, 5]


def test_shares_are_exact_where_floats_are_not():
    assert partition.apportion(10, [1e308, 1e308]) == [5, 5]  # their float sum is infinite
    n = 3 * 10**17 + 1  # above 2**53: n / 3 is no float
    assert partition.apportion(n, [0.1] * 3) == [10**17 + 1, 10**17, 10**17]
    assert partition.apportion(7, [5e-324, 0, 5e-324]) == [4, 0, 3]


@quick
@given(n=sizes, seed=seeds, epoch=st.integers(0, 10**9))
def test_a_permutation_holds_every_index_once(n, seed, epoch):
    assert sorted(partition.permutation(n, seed, epoch).tolist()) == list(range(n))


def test_permutations_are_pinned():
    assert partition.permutation(10, seed=1).tolist() == PINNED[0]
    assert partition.permutation(10, seed=1, epoch=1).tolist() == PINNED[1]


def test_all_permutations_are_equally_likely():
    draws = 5000
    seen = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(draws):
        seen[tuple(partition.permutation(4, 7, epoch).tolist())] += 1
    # Hoeffding for one of 24 frequencies, union bound: a fair source exceeds this with probability below 1e-6.
    bound = math.sqrt(math.log(2 * 24 / 1e-6) / (2 * draws))
    assert max(abs(count / draws - 1 / 24) for count in seen.values()) < bound


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(partition.permutation(50, seed, epoch).tolist()) for seed in range(-5, 5) for epoch in range(10)}
    assert len(orders) == 100


def test_random_ranks_hold_the_blocks_of_one_permutation():
    whole = np.concatenate([partition.random_partition(11, 3, rank, seed=5, epoch=2) for rank in range(3)])
    assert np.array_equal(whole, partition.permutation(11, 5, 2))


@quick
@given(fields=st.lists(st.integers(-(2**80), 2**80), min_size=1, max_size=4))
def test_the_hash_matches_splitmix64_in_python_integers(fields):
    h = 0
    for field in fields:
        z = (h + (field + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        h = z ^ z >> 31
    assert int(hash64(*fields)) == h


def test_the_hash_of_an_array_is_the_hash_of_each_element():
    last = np.array([-3, 0, 5], dtype=np.int64)
    assert hash64(1, last).tolist() == [int(hash64(1, value)) for value in last.tolist()]


@pytest.mark.parametrize(
    "call, numbers",
    [
        (lambda: partition.block_partition(5, 0, 0), ["n=5", "world_size=0", "rank=0"]),
        (lambda: partition.block_partition(-1, 2, 0), ["n=-1"]),
        (lambda: partition.strided_partition(5, 2, 2), ["world_size=2", "rank=2"]),
        (lambda: partition.random_partition(5, 2, -1, seed=0), ["world_size=2", "rank=-1"]),
        (lambda: partition.weighted_partition(5, [1, 2], 2), ["world_size=2", "rank=2"]),
        (lambda: partition.weighted_partition(5, [], 0), ["world_size=0"]),
        (lambda: partition.weighted_partition(5, [1, -0.5], 0), ["[1, -0.5]"]),
        (lambda: partition.weighted_partition(5, [0, 0.0], 0), ["[0, 0.0]"]),
        (lambda: partition.weighted_partition(5, [1, math.nan], 0), ["nan"]),
        (lambda: partition.weighted_partition(5, [1, math.inf], 0), ["inf"]),
        (lambda: partition.permutation(-2, 0), ["n=-2"]),
        (lambda: partition.apportion(-3, [1]), ["n=-3"]),
    ],
)
def test_impossible_input_is_refused_with_its_numbers(call, numbers):
    with pytest.raises(ValueError) as error:
        call()
    assert all(number in str(error.value) for number in numbers)
