"""A group's part of the arenas: three slots on every rank.

One meeting separates filling a slot from reading it. While the others still read what lay in slot k, slots k+1 and k+2
are filled: with three, one meeting per chunk is enough for all-reduce too, whose slots are read twice. The place goes
on from one operation to the next, so that none begins in a slot which a slower rank still reads.

The first groups that send large tensors keep large slots. Those after them keep small ones, and for what would take
many pieces through them borrow what is free, for one operation: a meeting before it, to tell where, and one behind it,
after which nobody reads there any more.
"""

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist.tools.shm.arena import ArenaFull
from minidist.tools.shm.neighbours import Neighbours
from minidist.tools.shm.rendezvous import Meeting, ShmError
from minidist.tools.shm.sizes import ALIGN, LARGE_BYTES, SLOTS, SMALL_BYTES

_MIN_BYTES = 4096
_KEPT = ((4 * 2**20, 10), (5 * 2**19, 6), (0, 1))  # with more free than so much, a group keeps so many sixteenths
_MANY = 4  # pieces: as long as two meetings
_VIEWS = 256
_PLACE = struct.Struct("<QQ")


class Slots:
    """The slots of one size, of all ranks of the group. Leased at the first use, which all ranks make together."""

    def __init__(self, here: Neighbours, meeting: Meeting, memories: list[Tensor], small: bool = False):
        self._here, self._meeting, self._memories, self._small = here, meeting, memories, small
        self.bytes = 0  # of a slot, 0 until the ranks agree
        self.lease: tuple[int, int] | None = None
        self._at: list[int] = []
        self._next = 0
        self._views: dict[tuple, Any] = {}

    def agree(self, told: str, shown: str) -> None:
        """Lease, and tell the others where; the smallest slot of all ranks is the size of all."""
        if self.lease is None:
            self.lease = self._take()
        self._settle(*self.lease, told, shown)

    def _settle(self, offset: int, size: int, told: str, shown: str) -> None:
        place = _PLACE.pack(offset, size // SLOTS)
        places = [_PLACE.unpack(p) for p in self._meeting.begin(told, shown, place)]
        settled = [offset for offset, _ in places], min(size for _, size in places)
        if settled != (self._at, self.bytes):
            self._at, self.bytes = settled
            self._views.clear()

    def finish(self) -> None:
        """The operation is over on this rank."""

    def _take(self) -> tuple[int, int]:
        arena = self._here.arena
        self._here.reclaim()
        free = arena.free_bytes()
        sixteenths = next(part for least, part in _KEPT if free >= least)
        size = SMALL_BYTES if self._small else _slot_bytes(sixteenths * free // 16)
        try:
            size = SLOTS * max(size, _MIN_BYTES)
            return arena.lease(size), size
        except ArenaFull as full:
            raise ShmError(
                f"no shared memory is left for {self._meeting}: {full}. Destroy groups that are not used any more, "
                "or make fewer"
            ) from None

    def turn(self, key: tuple, make: Callable[[list[Tensor]], Any]) -> Any:
        """`make` of the next slot of every rank, (bytes,) uint8 each.

        Kept under `key`: a training step uses the same few shapes over and over, and a view takes microseconds.
        """
        key = (self._next, *key)
        if key not in self._views:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            begin = self._next * self.bytes
            pairs = zip(self._memories, self._at, strict=True)
            self._views[key] = make([memory[at + begin : at + begin + self.bytes] for memory, at in pairs])
        self._next = (self._next + 1) % SLOTS
        return self._views[key]

    def section_bytes(self) -> int:
        """Of a slot cut into one part per rank."""
        return self.bytes // self._meeting.size // ALIGN * ALIGN


class BorrowedSlots(Slots):
    """Slots for one operation at a time, of what is free; where nothing is, `kept` serve it.

    Nobody waits for memory: two groups that wait for each other's could wait for ever.
    """

    def __init__(self, here: Neighbours, meeting: Meeting, memories: list[Tensor], kept: Slots):
        super().__init__(here, meeting, memories)
        self._kept = kept

    def worth(self, need: int) -> bool:
        """Whether `need` bytes at a time go through larger slots faster. All ranks judge alike."""
        return self._kept.bytes < LARGE_BYTES and need > _MANY * self._kept.bytes

    def agree(self, told: str, shown: str) -> None:
        arena = self._here.arena
        size = SLOTS * _slot_bytes(5 * arena.free_bytes() // 8)
        if size > self._kept.lease[1]:
            with contextlib.suppress(ArenaFull):  # another thread was faster
                self.lease = arena.lease(size), size
        self._settle(*(self.lease or self._kept.lease), told, shown)

    def finish(self) -> None:
        """Wait until all ranks have read, and give back. After an error the lease is the group's until it ends."""
        self._meeting.meet()
        if self.lease is not None:
            self._here.arena.release(*self.lease)
            self.lease = None


def _slot_bytes(part: int) -> int:
    """Of a slot, where three may take so much."""
    return min(LARGE_BYTES, part // SLOTS // _MIN_BYTES * _MIN_BYTES)


def section(slot: Tensor, which: int, size: int, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """`length` elements at the beginning of part `which` of a slot whose parts have `size` bytes."""
    return slot[which * size : which * size + length * dtype.itemsize].view(dtype)
