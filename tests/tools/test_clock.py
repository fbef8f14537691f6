"""Time intervals, their union, and a common clock for all ranks."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import bind
from minidist.mesh import Mesh
from minidist.tools.trace.clock import DeviceClock, measure_clock_offset
from minidist.tools.trace.intervals import assign_lanes, covered_time, intersect_intervals, merge_intervals

rows = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda row: (row[0], row[0] + row[1])))


def cells(intervals):
    """The unit intervals that are covered."""
    return {unit for begin, end in intervals for unit in range(begin, end)}


@given(rows, rows)
def test_the_union_of_intervals_covers_their_cells(a, b):
    assert cells(merge_intervals(a)) == cells(a) and covered_time(a) == len(cells(a))
    assert cells(intersect_intervals(a, b)) == cells(a) & cells(b) and covered_time(intersect_intervals(a, b)) == len(
        cells(a) & cells(b)
    )
    apart = merge_intervals(a)
    assert all(left[1] < right[0] for left, right in zip(apart, apart[1:], strict=False))


@given(rows)
def test_no_two_intervals_of_a_lane_overlap(intervals):
    intervals = sorted(intervals)
    for lane in set(chosen := assign_lanes(intervals)):
        mine = [interval for interval, at in zip(intervals, chosen, strict=True) if at == lane]
        assert all(before[1] <= after[0] for before, after in zip(mine, mine[1:], strict=False))


AHEAD_NS = 5_000_000_000


def measured_offset(world):
    """Clock offsets measured as if every rank were a host whose clock is ahead of the previous rank's."""
    world = replace(world, node_rank=world.rank)
    group = bind(world, Mesh(dp=world.size))["control"]
    return measure_clock_offset(group, lambda: time.monotonic_ns() + world.rank * AHEAD_NS)


@pytest.mark.parametrize("size", [2, 3])
def test_clocks_of_hosts_are_aligned_within_the_error_that_is_reported(ranks, size):
    for rank, (offset, error) in enumerate(ranks(measured_offset, size)):
        assert abs(offset + rank * AHEAD_NS) <= error < AHEAD_NS
        assert (error == 0) == (rank == 0)


def own_host(world):
    return measure_clock_offset(bind(world, Mesh(dp=world.size))["control"])


def test_ranks_of_one_host_have_one_clock(ranks):
    assert ranks(own_host, 3) == [(0, 0)] * 3


def test_device_events_are_placed_on_the_host_clock(monkeypatch):
    """Places events of a simulated device queue that is 2.5 ms behind at its second event; needs no GPU."""
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = 2.5 * len(recorded)
            recorded.append(self)

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, synchronize=lambda: None))
    before = time.monotonic_ns()
    clock = DeviceClock()
    first, second = clock.now(), clock.now()
    assert clock.to_host_ns(second) - clock.to_host_ns(first) == 2_500_000
    assert before + 2_500_000 <= clock.to_host_ns(first) <= time.monotonic_ns() + 2_500_000
