"""One clock for all ranks, to lay what they did at the same time side by side.

Ranks of one host need no exchange: they read CLOCK_MONOTONIC, which the kernel keeps once and gives to every process
alike, whatever its core, and which nobody can set. Each host has begun its own at another moment, so the ranks of other
hosts measure how far theirs is from that of rank 0's host (Cristian 1989, Probabilistic Clock Synchronization): ask,
note when the answer came, and take it for the middle of the way. However the time is divided between there and back,
the error is at most half of it, and of many exchanges the shortest counts. What is measured once drifts from then on,
by some tens of microseconds a second between common quartz clocks.
"""

import time
from collections.abc import Callable

import torch

from minidist.comm.collectives import recv, send
from minidist.comm.group import Group
from minidist.comm.objects import all_gather_object

EXCHANGES = 16


def offset_from_first(group: Group, now: Callable[[], int] = time.monotonic_ns) -> tuple[int, int]:
    """(what to add to this rank's clock to read that of the group's first rank, by how much that may be off), in ns.

    Every rank of the group calls it. (0, 0) on the first rank's own host.
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
        # Rounded up: half a nanosecond more is still a bound.
        found.append(((answered - asked + 1) // 2 + 1, reading.item() - (asked + answered) // 2))
    error, offset = min(found)
    return offset, error


class HostClock:
    """Moments of this rank's host, in nanoseconds."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns):
        self.now = now

    def nanoseconds(self, moment: int) -> int:
        """The moment on this host's clock."""
        return moment


class DeviceClock:
    """Moments of the queue of work of a CUDA device: when it came to this point, not when Python asked it to.

    There the host runs ahead, and `wait()` holds up the device's queue in its place, so only such moments show what
    took how long and who waited. A moment costs an event in the current stream.
    """

    def __init__(self):
        self._first = self.now()
        torch.cuda.synchronize()
        self._first_ns = time.monotonic_ns()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, moment: torch.cuda.Event) -> int:
        """The moment on this host's clock, to the few microseconds that the first one took to be seen."""
        moment.synchronize()
        return self._first_ns + round(self._first.elapsed_time(moment) * 1e6)
