"""Balancing stages by cost, against an exhaustive search over all cuts."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.balance import balance_layers

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def all_cuts(layers, parts):
    for inner in combinations(range(1, layers), parts - 1):
        edges = (0, *inner, layers)
        yield [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def part_loads(cut, costs, embedding, head):
    sums = [sum(costs[i] for i in part) for part in cut]
    sums[0] += embedding
    sums[-1] += head
    return sums


@given(COSTS, st.integers(1, 6), st.integers(0, 20), st.integers(0, 20))
def test_balance_is_the_best_of_all_cuts(costs, parts, embedding, head):
    parts = min(parts, len(costs))

    def worth(cut):
        of = part_loads(cut, costs, embedding, head)
        return max(of), sum(load**2 for load in of), [part.stop for part in cut]

    assert balance_layers(costs, parts, embedding=embedding, head=head) == min(all_cuts(len(costs), parts), key=worth)


def test_the_largest_load_matters_more_than_evenness():
    """1 | 5 | 2 3 against 1 5 | 2 | 3, whose sum of squares is less."""
    assert balance_layers([1, 5, 2, 3], 3) == [range(0, 1), range(1, 2), range(2, 4)]


@given(st.integers(1, 40), st.integers(1, 12))
def test_equal_layers_are_spread_evenly(layers, stages):
    stages = min(stages, layers)
    sizes = [len(part) for part in balance_layers([1.0] * layers, stages)]
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)


@given(st.integers(2, 30), st.integers(1, 8))
def test_equal_costs_balance_equally_despite_rounding(layers, stages):
    stages = min(stages, layers)
    assert balance_layers([0.1] * layers, stages) == balance_layers([1] * layers, stages)


def test_a_costly_head_takes_layers_from_the_last_stage():
    assert [len(part) for part in balance_layers([1] * 12, 4)] == [3, 3, 3, 3]
    assert [len(part) for part in balance_layers([1] * 12, 4, head=2.0)] == [3, 3, 4, 2]
    assert [len(part) for part in balance_layers([1] * 12, 4, embedding=3.0)] == [1, 3, 4, 4]


def test_each_chunk_is_a_part():
    parts = balance_layers([1] * 8, 2, chunks=2)
    assert parts == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_126_layers_over_16_stages():
    assert [len(part) for part in balance_layers([1.0] * 126, 16, embedding=1.0, head=2.0)] == [7, *[8] * 14, 7]


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "message"),
    [
        (2, 4, 1, "4 stages need a layer each, and the model has 2: take 2 stages, or give it 4 layers."),
        (5, 4, 2, "4 stages x 2 chunks = 8 parts need a layer each, and the model has 5: take 2 stages, or give it 8"),
        (1, 1, 2, "1 stages x 2 chunks = 2 parts need a layer each, and the model has 1: give it 2 layers."),
    ],
)
def test_fewer_layers_than_parts_are_refused(layers, stages, chunks, message):
    with pytest.raises(UserError) as error:
        balance_layers([1.0] * layers, stages, chunks)
    assert message in str(error.value)
