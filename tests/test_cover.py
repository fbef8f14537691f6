"""The cases of parity cover every pair of switch values, which this file counts by itself."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.parity.cases import SWITCHES, coverage, plan, switches_of
from minidist.parity.cover import pairwise

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=6)


def missing_pairs(switches, cases):
    """Pairs of values of two switches that no case has, by looking for each of them."""
    return [
        (a, x, b, y)
        for a, b in combinations(switches, 2)
        for x, y in product(switches[a], switches[b])
        if not any(case[a] == x and case[b] == y for case in cases)
    ]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 100))
def test_every_pair_of_values_of_any_switches_is_in_some_case(sizes, seed):
    switches = {f"s{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    cases = pairwise(switches, seed)
    assert missing_pairs(switches, cases) == []
    assert all(case.keys() == switches.keys() and all(case[s] in switches[s] for s in switches) for case in cases)


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES)
def test_a_cover_is_never_longer_than_the_whole_product_and_starts_no_case_twice(sizes):
    switches = {f"s{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    cases = [tuple(case.values()) for case in pairwise(switches)]
    assert len(set(cases)) == len(cases) <= len(list(product(*switches.values())))


def test_the_same_seed_gives_the_same_cases_and_another_one_others():
    assert pairwise(SWITCHES, 3) == pairwise(SWITCHES, 3) != pairwise(SWITCHES, 4)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_rows_of_any_number_of_ranks_cover_all_pairs_on_these_and_on_one(ranks):
    cases = plan(ranks)
    assert {case.world for case in cases} == {1, ranks}
    for world in {1, ranks}:
        mine = [vars(case) for case in cases if case.world == world]
        assert missing_pairs(switches_of(world), mine) == []
        assert len(mine) <= 12  # of 4096


def test_coverage_counts_what_a_part_of_the_rows_leaves_out():
    cases = [case for case in plan(2) if case.world == 2]
    met, pairs = coverage(2, cases)
    assert met == pairs == sum(len(SWITCHES[a]) * len(SWITCHES[b]) for a, b in combinations(SWITCHES, 2))
    assert coverage(2, cases[:1]) == (len(list(combinations(SWITCHES, 2))), pairs)


def test_one_rank_has_no_case_about_ranks_that_differ():
    assert all(case.start == case.shares == "equal" for case in plan(4) if case.world == 1)


def test_the_full_plan_is_the_whole_product():
    cases = plan(2, full=True)
    assert len(cases) == len(set(cases)) == 2**12 + 2**10
