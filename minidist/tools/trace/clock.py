"""One clock for all ranks, so that their recordings line up.

Ranks of one host share CLOCK_MONOTONIC: it is the same for every process and core, and nobody can set it. Its origin
differs between hosts, so ranks on other hosts measure their offset from rank 0's host (Cristian 1989, Probabilistic
Clock Synchronization): request a reading, and assume that it was taken halfway through the round trip. The error is at
most half the round trip however its time is split, so the shortest of several exchanges is used. The offset drifts
after the measurement, by tens of microseconds per second between common quartz clocks.
"""

import time
from collections.abc import Callable

import torch

from minidist.comm.collectives import recv, send
from minidist.comm.group import Group
from minidist.comm.objects import all_gather_object

EXCHANGES = 16


def measure_clock_offset(group: Group, now: Callable[[], int] = time.monotonic_ns) -> tuple[int, int]:
    """(offset to add to this rank's clock to get that of the group's first rank, bound of its error), in nanoseconds.

    Collective over the group. (0, 0) on the first rank's host.
    """
    nodes = all_gather_object(group.world.node_rank, group)
    for place, node in enumerate(nodes):
        if node != nodes[0]:
            if group.rank == 0:
                _answer(group, place, now)
            elif group.rank == place:
                return _ask(group, now)
    return 0, 0


def _answer(group: Group, place: int, now: Callable[[], int]) -> None:
    reading = torch.zeros(1, dtype=torch.int64, device=group.world.control_device)
    for _ in range(EXCHANGES):
        recv(reading, place, group, async_op=True).wait(host=True)
        reading.fill_(now())
        send(reading, place, group)


def _ask(group: Group, now: Callable[[], int]) -> tuple[int, int]:
    found = []
    reading = torch.zeros(1, dtype=torch.int64, device=group.world.control_device)
    for _ in range(EXCHANGES):
        asked = now()
        send(reading, 0, group)
        recv(reading, 0, group, async_op=True).wait(host=True)
        answered = now()
        # Rounded up, so that it stays a bound.
        found.append(((answered - asked + 1) // 2 + 1, reading.item() - (asked + answered) // 2))
    error, offset = min(found)
    return offset, error


class HostClock:
    """Timestamps of this rank's host, in nanoseconds."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns):
        self.now = now

    def to_host_ns(self, timestamp: int) -> int:
        """The timestamp on this host's clock."""
        return timestamp


class DeviceClock:
    """Timestamps of a CUDA stream: when the device reached this point, not when Python enqueued it.

    The host runs ahead of the device, and `wait()` makes the stream wait and not the host, so only the stream's times
    show how long work and waits took. A timestamp costs one event in the current stream.
    """

    def __init__(self):
        self._first = self.now()
        torch.cuda.synchronize()
        self._first_ns = time.monotonic_ns()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def to_host_ns(self, timestamp: torch.cuda.Event) -> int:
        """The timestamp on this host's clock, exact to a few microseconds."""
        timestamp.synchronize()
        return self._first_ns + round(self._first.elapsed_time(timestamp) * 1e6)
