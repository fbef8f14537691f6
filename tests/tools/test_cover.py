"""The cases of parity cover every pair of switch values, counted independently here."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.tools.parity.cases import SWITCHES
from minidist.tools.parity.cover import CaseFamily, pairwise_cover
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.tools.parity.plan import list_cases, plan_cases, possible_switch_values
from minidist.validation import SCHEDULES
from tests.helpers.exhaustive import exhaustive

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=6)


# Without master weights, one dtype: a reducer that has none cannot train in 16 bits.
IMPOSSIBLE = {("dtype", half, "gradients", kind) for half in ("bf16", "fp16") for kind in ("naive", "central")}
# A rank with gradients of its own: SGD only, no clipping by a norm of its own, and no resumption here.
OWN_GRADIENTS = ("local", "diloco", "gossip", "stale", "asynchronous")
IMPOSSIBLE |= {
    pair
    for kind in OWN_GRADIENTS
    for pair in (
        *(("dtype", half, "gradients", kind) for half in ("bf16", "fp16")),
        *(("optimizer", other, "gradients", kind) for other in ("adamw", "muon")),
        ("gradients", kind, "clip", True),
        ("gradients", kind, "resume", True),
        *(("gradients", kind, "recompute", what) for what in ("block", "selective")),
    )
}
# What the simple engine leaves out.
ALGORITHMS = ("all-reduce=tree", "all-reduce=ring", "all-reduce=doubling")
SIMPLE_GRADIENTS = {"bucketed", "zero1", "zero2", "zero3", "zero3-freed", "naive", "local", "diloco", *ALGORITHMS}
IMPOSSIBLE |= {("gradients", kind, "engine", "simple") for kind in {*SWITCHES["gradients"]} - SIMPLE_GRADIENTS}
IMPOSSIBLE |= {("optimizer", "muon", "engine", "simple"), ("recompute", "selective", "engine", "simple")}
# Only the simple engine has all-reduce algorithms, and they go with one value of each other switch.
ONE_VALUE = {name: values[0] for name, values in SWITCHES.items()} | {"micro_batches": 4, "engine": "simple"}
IMPOSSIBLE |= {
    (name, value, "gradients", kind) if name in ("dtype", "optimizer") else ("gradients", kind, name, value)
    for name, values in SWITCHES.items()
    for kind, value in product(ALGORITHMS, values)
    if name != "gradients" and value != ONE_VALUE[name]
}


def missing_pairs(switches, cases):
    """Pairs of values of two switches that no case has, by looking for each of them."""
    return [
        (a, x, b, y)
        for a, b in combinations(switches, 2)
        for x, y in product(switches[a], switches[b])
        if (a, x, b, y) not in IMPOSSIBLE and not any(case[a] == x and case[b] == y for case in cases)
    ]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 100))
def test_every_pair_of_values_of_any_switches_is_in_some_case(sizes, seed):
    switches = {f"s{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    cases = pairwise_cover([CaseFamily(switches)], seed)
    assert missing_pairs(switches, cases) == []
    assert all(case.keys() == switches.keys() and all(case[s] in switches[s] for s in switches) for case in cases)


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES)
def test_a_cover_is_never_longer_than_the_whole_product_and_starts_no_case_twice(sizes):
    switches = {f"s{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    cases = [tuple(case.values()) for case in pairwise_cover([CaseFamily(switches)])]
    assert len(set(cases)) == len(cases) <= len(list(product(*switches.values())))


def test_the_same_seed_gives_the_same_cases_and_another_one_others():
    families = [CaseFamily(SWITCHES)]
    assert pairwise_cover(families, 3) == pairwise_cover(families, 3) != pairwise_cover(families, 4)


def test_switches_common_to_families_meet_all_possible_pairs():
    families = [CaseFamily({"x": (1, 2), "y": (1, 2)}, {"f": "a"}), CaseFamily({"x": (1,), "y": (1, 2)}, {"f": "b"})]
    cases = pairwise_cover(families)
    assert {(case["f"], case["x"]) for case in cases} == {("a", 1), ("a", 2), ("b", 1)}
    assert {(case["f"], case["y"]) for case in cases} == {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    assert {(case["x"], case["y"]) for case in cases} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert len(pairwise_cover(families, excluded=[frozenset("fx"), frozenset("fy")])) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, *exhaustive(5, 6, 7, 8)])
def test_data_parallelism_and_one_rank_have_all_pairs_of_their_own(ranks):
    for part, world in zip(plan_cases(ranks), sorted({1, ranks}), strict=False):
        assert {case.mesh_layout for case in part.cases} == {Layout(dp=world)}
        refused = {value for value in SWITCHES["micro_batches"] if f"dp={world} micro-batches={value}" in part.refused}
        possible = possible_switch_values(Layout(dp=world))
        possible["micro_batches"] = tuple(value for value in possible["micro_batches"] if value not in refused)
        assert missing_pairs(possible, [vars(case) for case in part.cases]) == []
        assert len(part.cases) <= 55  # of some hundred thousand


@pytest.mark.parametrize("ranks", [2, 3, 4, *exhaustive(6, 8)])
def test_every_factorisation_and_every_way_of_its_axes_is_there_and_meets_every_switch(ranks):
    """Counted from the axes alone, without the families that made the cover."""
    cases = [case for case in list_cases(plan_cases(ranks)) if case.world_size == ranks]
    axes = [(pp, dp, cp, tp) for pp, dp, cp, tp in product(range(1, ranks + 1), repeat=4) if pp * dp * cp * tp == ranks]
    of_mesh = {mesh: [case for case in cases if tuple(case.mesh_layout.mesh.sizes.values()) == mesh] for mesh in axes}
    for (pp, dp, cp, tp), mine in of_mesh.items():
        assert mine, f"pp={pp} dp={dp} cp={cp} tp={tp}"
        assert {case.mesh_layout.sequence for case in mine} == ({True, False} if tp > 1 else {None})
        assert {case.mesh_layout.context for case in mine} == ({"ring", "ulysses"} if cp > 1 else {None})
        for name, values in SWITCHES.items():
            expected = {"equal"} if name == "shares" and dp == 1 else set(values)
            if name == "gradients":
                hybrid = {"zero1-hybrid", "zero3-hybrid"}
                shared = {kind for kind in values if kind.startswith("zero")}
                expected -= (hybrid if dp % 2 or dp * cp == 2 else set()) | (shared if dp * cp == 1 else set())
                alone = {"central", "local", "diloco", "gossip", "stale", *ALGORITHMS}
                expected -= alone if dp < ranks else {"gossip"} if dp > 3 else set()
                expected -= {"asynchronous"}  # with more than one rank it trains another way
            if name == "micro_batches" and dp * 4 > 29:
                expected = {1}
            assert {getattr(case, name) for case in mine} == expected, (pp, dp, cp, tp, name)
    for stages in {pp for pp, *_ in axes} - {1}:
        assert {case.mesh_layout.schedule for case in cases if case.mesh_layout.pp == stages} == set(SCHEDULES)


def test_coverage_counts_what_a_part_of_the_rows_leaves_out():
    part = plan_cases(2)[1]
    met, pairs = part.count_covered_pairs(part.cases)
    possible = possible_switch_values(Layout(dp=2))
    every = sum(len(possible[a]) * len(possible[b]) for a, b in combinations(possible, 2))
    impossible = [pair for pair in IMPOSSIBLE if pair[1] in possible[pair[0]] and pair[3] in possible[pair[2]]]
    assert met == pairs == every - len(impossible)
    assert part.count_covered_pairs(part.cases[:1]) == (len(list(combinations(SWITCHES, 2))), pairs)


def test_impossible_combinations_are_never_a_row():
    names = {name for part in plan_cases(4) for name in part.refused}
    assert "pp=4 interleaved micro-batches=1" in names and "pp=4 zb-h2 micro-batches=1" in names
    rows = list_cases(plan_cases(2, full=True))
    assert not any(
        case.mesh_layout.schedule in ("interleaved", "zb-h2") and case.num_micro_batches == 1 for case in rows
    )
    assert len(rows) == sum(part.num_combinations for part in plan_cases(2)) > 100_000
    assert len(list_layouts(8)) == 139 and len({layout.mesh for layout in list_layouts(8)}) == 20
