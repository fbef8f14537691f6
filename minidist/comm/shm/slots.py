"""A group's part of the arenas: three slots on every rank.

One meeting separates filling a slot from reading it. While the others still read what lay in slot k, slots k+1 and k+2
are filled: with three, one meeting per chunk is enough for all-reduce too, whose slots are read twice. The place goes
on from one operation to the next, so that none begins in a slot which a slower rank still reads.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist.comm.shm.arena import ArenaFull
from minidist.comm.shm.meeting import Meeting, ShmError
from minidist.comm.shm.neighbours import Neighbours

SLOTS = 3
SMALL_BYTES = 16 * 1024  # of a slot for small tensors
_ALIGN = 64  # bytes: a cache line, and a multiple of every element's size
_MIN_BYTES = 4096
LARGE_BYTES = 2**20  # of a slot for large tensors, when there is room: more hardly helps, and leaves the cache
_PLENTY_BYTES = 3 * 2**19  # most of what is free while there is more, then a sixteenth: there is always some left
_KEPT_VIEWS = 256
_PLACE = struct.Struct("<QQ")


class Slots:
    """The slots of one size, of all ranks of the group. Leased at the first use, which all ranks make together."""

    def __init__(self, here: Neighbours, meeting: Meeting, memories: list[Tensor], small: bool):
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
        offset, size = self.lease[0], self.lease[1] // SLOTS
        places = [_PLACE.unpack(p) for p in self._meeting.begin(told, shown, _PLACE.pack(offset, size))]
        self._at = [offset for offset, _ in places]
        self.bytes = min(size for _, size in places)

    def _take(self) -> tuple[int, int]:
        arena = self._here.arena
        self._here.reclaim()
        free = arena.free_bytes()
        part = 5 * free // 8 if free > _PLENTY_BYTES else free // 16
        large = min(LARGE_BYTES, part // SLOTS // _MIN_BYTES * _MIN_BYTES)
        size = SMALL_BYTES if self._small else large
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
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            begin = self._next * self.bytes
            pairs = zip(self._memories, self._at, strict=True)
            self._views[key] = make([memory[at + begin : at + begin + self.bytes] for memory, at in pairs])
        self._next = (self._next + 1) % SLOTS
        return self._views[key]

    def section_bytes(self) -> int:
        """Of a slot cut into one part per rank."""
        return self.bytes // self._meeting.size // _ALIGN * _ALIGN


def even(n: int, longest: int) -> int:
    """The length of parts, at most `longest`, of which `n` elements take as few as possible, none much shorter."""
    count = max(1, -(-n // longest))
    return min(longest, max(1, -(-n // count // _ALIGN)) * _ALIGN)


def section(slot: Tensor, which: int, size: int, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """`length` elements at the beginning of part `which` of a slot whose parts have `size` bytes."""
    return slot[which * size : which * size + length * dtype.itemsize].view(dtype)
