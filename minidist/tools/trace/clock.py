"""One clock for all ranks, so that their recordings line up.

Ranks of one host share CLOCK_MONOTONIC: it is the same for every process and core, and cannot be set. Its origin
differs between hosts, so ranks on other hosts measure their offset from rank 0's host (Cristian 1989, Probabilistic
Clock Synchronization): request a reading, and assume that it was taken halfway through the round trip. The error is at
most half the round trip, however asymmetric it is, so the shortest of several exchanges is used. The offset drifts
after the measurement, by tens of microseconds per second between common quartz clocks.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from minidist.comm.collectives import recv, send
from minidist.comm.group import Group
from minidist.comm.objects import all_gather_object

EXCHANGES = 16


class ClockOffset(NamedTuple):
    """The offset of this rank's clock from the clock of its group's first rank.

    offset_ns: nanoseconds to add to a time of this rank. error_ns: upper limit of the error of `offset_ns`.
    """

    offset_ns: int
    error_ns: int


def measure_clock_offset(group: Group, now: Callable[[], int] = time.monotonic_ns) -> ClockOffset:
    """Measure the offset of this rank's clock from the clock of the group's first rank. Collective.

    Returns (0, 0) on ranks on the first rank's host, which share its clock. now: a function without arguments that
    returns the time of this rank's clock in nanoseconds.
    """
    nodes = all_gather_object(group.world.node_rank, group)
    for rank, node in enumerate(nodes):
        if node != nodes[0]:
            if group.rank == 0:
                _send_readings(group, rank, now)
            elif group.rank == rank:
                return _request_readings(group, now)
    return ClockOffset(0, 0)


def _send_readings(group: Group, rank: int, now: Callable[[], int]) -> None:
    """Answer the clock requests of group rank `rank`, on the first rank of the group."""
    reading = torch.zeros(1, dtype=torch.int64, device=group.world.control_device)
    for _ in range(EXCHANGES):
        recv(reading, rank, group, async_op=True).wait(host=True)
        reading.fill_(now())
        send(reading, rank, group)


def _request_readings(group: Group, now: Callable[[], int]) -> ClockOffset:
    """Read the clock of the group's first rank several times; return the offset with the least error."""
    exchanges = []
    reading = torch.zeros(1, dtype=torch.int64, device=group.world.control_device)
    for _ in range(EXCHANGES):
        requested = now()
        send(reading, 0, group)
        recv(reading, 0, group, async_op=True).wait(host=True)
        received = now()
        # Rounded up, so that it stays a bound.
        exchanges.append(((received - requested + 1) // 2 + 1, reading.item() - (requested + received) // 2))
    error, offset = min(exchanges)
    return ClockOffset(offset, error)


class HostClock:
    """A clock for timestamps on the CPU, in nanoseconds; for CUDA see `DeviceClock`.

    now: a function without arguments that reads this host's monotonic clock.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns):
        self.now = now

    def to_host_ns(self, timestamp: int) -> int:
        """Return `timestamp` unchanged: it is a time of this host's clock, in nanoseconds, already."""
        return timestamp


class DeviceClock:
    """A clock for timestamps on a CUDA device: the time at which the device, not Python, reaches a point of the stream.

    The host runs ahead of the device, and `wait()` makes the stream wait and not the host, so only the stream's times
    show how long work and waits took. A timestamp costs one event in the current stream.
    """

    def __init__(self):
        self._first = self.now()
        torch.cuda.synchronize()
        self._first_ns = time.monotonic_ns()

    def now(self) -> torch.cuda.Event:
        """Record a CUDA event in the current stream; return it as the timestamp."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def to_host_ns(self, timestamp: torch.cuda.Event) -> int:
        """Return the time of the event on this host's monotonic clock in nanoseconds, exact to a few microseconds.

        Blocks until the device has reached the event.
        """
        timestamp.synchronize()
        return self._first_ns + round(self._first.elapsed_time(timestamp) * 1e6)
