"""The table of wire bytes, against the algorithms simulated message by message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.wire_bytes import ASSUMED_ALGORITHMS, chunk_sizes, sent_elements

sizes = st.integers(1, 8)
counts = st.integers(0, 50)


def ring_all_reduce_elements(n, size):
    """Elements each rank sends, by walking the ring: reduce-scatter, then all-gather."""
    parts, sent = chunk_sizes(n, size), [0] * size
    for step in range(size - 1):
        for rank in range(size):
            sent[rank] += parts[(rank - step) % size]
    for step in range(size - 1):
        for rank in range(size):
            sent[rank] += parts[(rank + 1 - step) % size]
    return sent


def binomial_broadcast_elements(n, size, root):
    """Elements each rank sends when, in every round, each rank that has the tensor sends it to one that has not."""
    sent, holders, distance = [0] * size, [0], 1
    while distance < size:
        for relative in list(holders):
            if relative + distance < size:
                sent[(relative + root) % size] += n
                holders.append(relative + distance)
        distance *= 2
    assert sorted(holders) == list(range(size))
    return sent


@given(counts, sizes)
def test_chunk_sizes_add_up_and_differ_by_at_most_one(n, size):
    parts = chunk_sizes(n, size)
    assert sum(parts) == n and len(parts) == size and max(parts) - min(parts) <= 1


@given(counts, sizes)
def test_all_reduce_bytes_are_those_of_the_ring(n, size):
    assert [sent_elements("all_reduce", n, size, rank) for rank in range(size)] == ring_all_reduce_elements(n, size)


@given(counts, sizes, st.data())
def test_broadcast_bytes_are_those_of_the_binomial_tree(n, size, data):
    root = data.draw(st.integers(0, size - 1))
    assert [
        sent_elements("broadcast", n, size, rank, root=root) for rank in range(size)
    ] == binomial_broadcast_elements(n, size, root)


@given(st.integers(0, 20), sizes)
def test_reduce_scatter_and_all_gather_send_half_of_an_all_reduce_each(part, size):
    n = part * size
    for rank in range(size):
        halves = sent_elements("reduce_scatter", n, size, rank) + sent_elements("all_gather", n, size, rank)
        assert halves == sent_elements("all_reduce", n, size, rank) == 2 * part * (size - 1)


@given(counts, st.integers(2, 8))
def test_all_to_all_sends_all_but_the_local_chunk(n, size):
    for rank in range(size):
        assert sent_elements("all_to_all", n, size, rank) == n - chunk_sizes(n, size)[rank]
    assert sent_elements("all_to_all", 6, 2, 0, splits=[1, 5]) == 5


@pytest.mark.parametrize("name", ASSUMED_ALGORITHMS)
def test_one_rank_sends_nothing(name):
    assert sent_elements(name, 100, 1, 0) == 0


def test_flat_operations_send_to_or_from_the_root():
    assert [sent_elements("gather", 10, 4, r, root=2) for r in range(4)] == [10, 10, 0, 10]
    assert [sent_elements("scatter", 10, 4, r, root=2) for r in range(4)] == [0, 0, 30, 0]
    assert [sent_elements("reduce", 10, 4, r, root=2) for r in range(4)] == [10, 10, 0, 10]
    assert (sent_elements("send", 10, 4, 1), sent_elements("recv", 10, 4, 1)) == (10, 0)


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="no operation 'gossip'"):
        sent_elements("gossip", 1, 2, 0)
