"""The cost model: its counts match the algorithms' messages, and its fit recovers the link of synthetic timings."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.simple import collectives
from minidist.tools.network.calibrate import (
    TimedOperation,
    fit_link,
    fit_link_to_primitives,
    measure_collectives,
    relative_errors,
)
from minidist.tools.network.cost import (
    MODELLED_ALGORITHMS,
    Cost,
    Link,
    bandwidth_speedup,
    bus_bandwidth,
    collective_cost,
    cost_lower_bound,
    fastest_algorithm,
    hierarchical_all_reduce_seconds,
    tree_depth,
)
from minidist.tools.network.overlap import best_bucket_bytes, bucket_intervals, last_bucket_end_s

NAMES = [
    (name, algorithm)
    for name, algorithms in MODELLED_ALGORITHMS.items()
    for algorithm in algorithms
    if name != "all_to_all"  # a backend's
]
KIB, MIB = 2**10, 2**20

# -- the counts -------------------------------------------------------------------------------------------------------


def run_collective(name: str, algorithm: str, whole: torch.Tensor, group) -> None:
    chunks = list(whole.tensor_split(group.size))
    match name:
        case "broadcast":
            collectives.tree_broadcast(whole, 0, group)
        case "reduce":
            collectives.tree_reduce(whole, 0, group)
        case "all_gather":
            collectives.ring_all_gather(chunks, group)
        case "reduce_scatter":
            collectives.ring_reduce_scatter(chunks, group)
        case "all_reduce":
            collectives.ALL_REDUCE[algorithm](whole, group)


def record_rounds(world: World, n: int) -> list:
    """This rank's rounds of every algorithm; a round is a list of (send or recv, peer, bytes)."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]
    results = []
    for name, algorithm in NAMES:
        group.meter.records.clear()
        run_collective(name, algorithm, torch.ones(n), group)
        batches = defaultdict(list)
        for record in group.meter.records:
            batches[record.batch].append((record.name, record.peer, record.payload_bytes))
        results.append(list(batches.values()))
    return results


def simulate_rounds(rounds: list[list], link: Link) -> float:
    """Seconds until the last rank is done, if a rank sends one message and receives one message at a time.

    rounds: by rank. A message starts when both ranks have reached its round and their ports are free.
    """
    size = len(rounds)
    at, left = [0] * size, [[list(messages) for messages in mine] for mine in rounds]
    ready, ends = [0.0] * size, [0.0] * size
    out, into = [0.0] * size, [0.0] * size
    while any(at[r] < len(left[r]) for r in range(size)):
        moved = False
        for rank in range(size):
            if at[rank] == len(left[rank]):
                continue
            for kind, peer, n in list(left[rank][at[rank]]):
                if kind != "send" or at[peer] == len(left[peer]) or ("recv", rank, n) not in left[peer][at[peer]]:
                    continue
                end = max(ready[rank], ready[peer], out[rank], into[peer]) + link.alpha_s + n * link.beta_s
                out[rank] = into[peer] = end
                ends[rank], ends[peer] = max(ends[rank], end), max(ends[peer], end)
                left[rank][at[rank]].remove((kind, peer, n))
                left[peer][at[peer]].remove(("recv", rank, n))
                moved = True
        for rank in range(size):
            while at[rank] < len(left[rank]) and not left[rank][at[rank]]:
                at[rank], ready[rank] = at[rank] + 1, ends[rank]
        assert moved, "the rounds of the ranks do not fit together"
    return max(ends)


@pytest.mark.parametrize("size", range(2, 9))
def test_costs_match_a_simulation_of_the_algorithms_messages(ranks, size):
    n = 840 * 4  # divides by every number of ranks, and by every number of active ranks
    every = ranks(record_rounds, size, n)
    for i, (name, algorithm) in enumerate(NAMES):
        rounds, counts = [mine[i] for mine in every], collective_cost(name, algorithm, size, 4 * n)
        got = simulate_rounds(rounds, Link(1.0, 0.0)), simulate_rounds(rounds, Link(0.0, 1.0))
        expected = counts.num_rounds, counts.sent_bytes
        if size & (size - 1) and algorithm == "doubling":
            # Ranks that sit for two and ranks that sit for one do not keep step: the sum of the longest is a bound.
            assert expected[0] - 1 <= got[0] <= expected[0] and 0.7 * expected[1] <= got[1] <= expected[1] + 1e-6
        else:
            assert got == pytest.approx(expected, rel=1e-12), f"{algorithm} {name}, {size} ranks"


@pytest.mark.parametrize("name, algorithm", NAMES)
@given(size=st.integers(1, 64), n=st.integers(0, 10**9))
def test_no_cost_is_below_the_lower_bound(name, algorithm, size, n):
    counts, bound = collective_cost(name, algorithm, size, n), cost_lower_bound(name, size, n)
    for field in ("num_rounds", "sent_bytes", "reduced_bytes"):
        assert getattr(counts, field) >= getattr(bound, field) * (1 - 1e-12), field


def test_costs_match_published_formulas():
    n = 2400.0
    assert collective_cost("all_reduce", "ring", 6, n) == Cost(10, 2 * 5 * 400, 5 * 400)
    assert collective_cost("all_reduce", "doubling", 8, n) == Cost(6, 2 * 7 * 300, 7 * 300)
    assert collective_cost("all_reduce", "tree", 5, n) == Cost(6, 6 * n, 3 * n)
    assert collective_cost("broadcast", "tree", 4, n) == Cost(2, 2 * n)
    assert collective_cost("all_reduce", "ring", 1, n) == Cost(0, 0)
    assert [tree_depth(size) for size in range(1, 10)] == [0, 1, 2, 2, 3, 3, 3, 3, 4]
    with pytest.raises(ValueError, match="no algorithm 'gossip'"):
        collective_cost("all_reduce", "gossip", 2, n)


def test_every_algorithm_of_the_table_has_a_cost():
    for name, algorithms in MODELLED_ALGORITHMS.items():
        for algorithm in algorithms:
            assert collective_cost(name, algorithm, 6, 100).num_rounds > 0


def test_across_slow_links_a_hierarchy_beats_the_flat_ring():
    near, far, n = Link(1e-6, 1e-11), Link(1e-5, 1e-9), 1e8
    flat = collective_cost("all_reduce", "ring", 32, n).seconds(far)
    assert hierarchical_all_reduce_seconds(4, 8, n, near, far) < flat / 5
    # 8 ranks of one node, or 8 nodes of one rank, are a ring.
    ring = collective_cost("all_reduce", "ring", 8, n)
    assert hierarchical_all_reduce_seconds(1, 8, n, near, far) == pytest.approx(ring.seconds(near))
    assert hierarchical_all_reduce_seconds(8, 1, n, near, far) == pytest.approx(ring.seconds(far))


# -- what follows from them -------------------------------------------------------------------------------------------

LINK = Link(alpha_s=1e-4, beta_s=1e-9, gamma_s=1e-10)


def test_the_fastest_algorithm_depends_on_the_size():
    assert fastest_algorithm("all_reduce", 16, KIB, LINK) == "doubling"
    # For other sizes than powers of two doubling first sends full tensors; the ring does not.
    assert fastest_algorithm("all_reduce", 12, 64 * MIB, LINK) == "ring"
    assert fastest_algorithm("all_reduce", 12, KIB, LINK) != "ring"


@given(size=st.integers(2, 64), n=st.integers(1, 10**9))
def test_bus_bandwidth_of_the_ring_is_that_of_the_link(size, n):
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = collective_cost(name, "ring", size, n).seconds(Link(0.0, 1e-9))
        assert bus_bandwidth(name, size, n, seconds) == pytest.approx(1e9)
    assert bus_bandwidth("broadcast", size, n, n * 1e-9) == pytest.approx(1e9)


def test_ten_times_the_bandwidth_speeds_up_large_messages_only():
    assert bandwidth_speedup(collective_cost("all_reduce", "ring", 4, 10**12), Link(1e-4, 1e-9)) == pytest.approx(
        10, rel=1e-3
    )
    assert bandwidth_speedup(collective_cost("all_reduce", "ring", 4, 8), Link(1e-4, 1e-9)) == pytest.approx(
        1, rel=1e-3
    )


def test_a_bucket_starts_when_full_and_its_predecessor_is_done():
    assert bucket_intervals([1.0, 2.0, 5.0], [0.5, 2.0, 1.0]) == [(1.0, 1.5), (2.0, 4.0), (5.0, 6.0)]
    # The second is full first, and waits for the one ahead of it.
    assert bucket_intervals([3.0, 1.0], [0.5, 0.5]) == [(3.0, 3.5), (3.5, 4.0)]
    assert bucket_intervals([], []) == []


def test_buckets_are_reduced_while_backward_goes_on():
    assert last_bucket_end_s(100, 100, 5.0, lambda n: n * 0.01) == pytest.approx(6.0)
    # Two halves: the first, full at 2.5, is done at 3.0, the second at 5.5.
    assert last_bucket_end_s(100, 50, 5.0, lambda n: n * 0.01) == pytest.approx(5.5)
    # A network slower than backward is the only thing that counts: 4 messages of 3 s after the first is full.
    assert last_bucket_end_s(100, 25, 4.0, lambda n: 3.0) == pytest.approx(13.0)
    assert last_bucket_end_s(0, 25, 4.0, lambda n: 3.0) == 0.0


def test_best_bucket_bytes_minimizes_the_end_of_the_last_bucket():
    def seconds(n):
        return collective_cost("all_reduce", "ring", 8, n).seconds(LINK)

    total, backward_s = 100 * MIB, 0.3
    best = best_bucket_bytes(total, backward_s, seconds)
    assert MIB <= best <= 32 * MIB
    times = {1 << k: last_bucket_end_s(total, 1 << k, backward_s, seconds) for k in range(16, 28)}
    assert times[best] == min(times.values()) and times[1 << 16] > times[best] < times[1 << 27]
    # Without latency small is best, without bandwidth to pay large is.
    assert best_bucket_bytes(total, backward_s, lambda n: n * 1e-9) == 64 * KIB
    assert best_bucket_bytes(total, backward_s, lambda n: 1.0) == 128 * MIB


# -- the fit ----------------------------------------------------------------------------------------------------------


def make_timings(link: Link, noise: float = 0.0, outliers: int = 0) -> list[TimedOperation]:
    """Synthetic timings: the model's, times exp(noise), some of them ten times as long."""
    draws = np.random.default_rng(3)
    results = []
    for name, algorithm in (("round", ""), ("add", ""), *NAMES):
        for k in range(10, 25):
            sample = TimedOperation(name, algorithm, 6, 1 << k, 1.0)
            seconds = sample.cost.seconds(link) * math.exp(noise * draws.standard_normal())
            results.append(TimedOperation(name, algorithm, 6, 1 << k, seconds))
    for at in draws.choice(len(results), outliers, replace=False):
        one = results[at]
        results[at] = TimedOperation(one.name, one.algorithm, one.group_size, one.num_bytes, one.seconds * 10)
    return results


TRUE_LINK = Link(alpha_s=5e-5, beta_s=4e-10, gamma_s=1.5e-10)


def test_the_fit_recovers_the_true_link():
    for found in (fit_link(make_timings(TRUE_LINK)), fit_link_to_primitives(make_timings(TRUE_LINK))):
        assert (found.alpha_s, found.beta_s, found.gamma_s) == pytest.approx((5e-5, 4e-10, 1.5e-10), rel=1e-6)
    assert max(relative_errors(make_timings(TRUE_LINK), TRUE_LINK)) < 1e-12


def test_noise_and_outliers_hardly_change_the_fit():
    # 240 timings with 10 % noise: a figure is known to about 0.1 / sqrt(240 / 3) = 1 %; a tenth of them outliers.
    found = fit_link(make_timings(TRUE_LINK, noise=0.1, outliers=24))
    assert (found.alpha_s, found.beta_s, found.gamma_s) == pytest.approx((5e-5, 4e-10, 1.5e-10), rel=0.15)


def test_the_fit_weighs_short_and_long_messages_equally():
    """An absolute error would let the longest decide: alpha is 0.3 % of it."""
    samples = [s for s in make_timings(TRUE_LINK, noise=0.05) if s.name == "round"]
    assert fit_link(samples).alpha_s == pytest.approx(5e-5, rel=0.1)


def test_unknown_figures_are_fitted_as_zero_and_none_is_negative():
    only = [s for s in make_timings(TRUE_LINK) if s.name == "add"]
    assert fit_link(only).alpha_s == fit_link(only).beta_s == 0.0 and fit_link(only).gamma_s == pytest.approx(
        TRUE_LINK.gamma_s
    )
    falling = [TimedOperation("round", "", 2, n, 1e-3 - 1e-10 * n) for n in (10, 1000, 100_000, 1_000_000)]
    found = fit_link(falling)
    assert found.beta_s == 0.0 and found.alpha_s == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(ValueError, match="no samples"):
        fit_link([])


def measure_all(world: World) -> list:
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))])["data"]
    return [
        (s.name, s.algorithm, s.group_size, s.num_bytes, s.seconds > 0)
        for s in measure_collectives(group, [64, 4096], repeats=1)
    ]


def test_every_algorithm_is_timed_at_every_size_on_all_ranks(ranks):
    first, *others = ranks(measure_all, 3)
    assert all(other == first for other in others)
    cases = {(name, algorithm) for name, algorithm, *_ in first}
    assert cases >= {("round", ""), ("add", ""), *NAMES, ("all_reduce", "backend"), ("all_gather", "backend")}
    # Whole parts for 3 ranks: 72 and 4104 bytes.
    assert {n for *_, n, _ in first} == {72, 4104} and len(first) == 2 * len(cases)
    assert all(ranks == 3 and positive for _, _, ranks, _, positive in first)
