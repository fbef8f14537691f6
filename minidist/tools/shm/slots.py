"""The slots of a group: three blocks in the arena of each of its ranks, used in turn.

One barrier separates filling a slot from reading it. While other ranks still read slot k, slots k+1 and k+2 are filled:
with three slots one barrier per chunk is enough, also for an all-reduce, whose slots are read twice. Each operation
continues with the slot after the last one used, so it never begins in a slot that a slower rank still reads.

The first groups that send large tensors keep large slots. Later groups keep small ones, and borrow free memory for one
operation at a time when the message would take many chunks. That costs two barriers: one before the operation, to
publish the offsets, and one after it, when no rank reads the memory any more.
"""

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist.tools.shm.arena import ArenaFull
from minidist.tools.shm.barrier import GroupBarrier, ShmError
from minidist.tools.shm.process_context import ProcessContext
from minidist.tools.shm.sizes import ALIGN, LARGE_BYTES, SLOTS, SMALL_BYTES

_MIN_BYTES = 4096
_KEPT = ((4 * 2**20, 10), (5 * 2**19, 6), (0, 1))  # (free bytes, sixteenths of them that a group keeps)
_MANY = 4  # chunks: as long as two barriers
_VIEWS = 256
_PLACE = struct.Struct("<QQ")


class Slots:
    """The slots of one size on all ranks of the group, leased at the first use, which all ranks make together.

    bytes: of one slot, the same on all ranks; 0 before the lease. lease: (offset, bytes) in this rank's arena.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, memories: list[Tensor], small: bool = False):
        self._context, self._barrier, self._memories, self._small = context, barrier, memories, small
        self.bytes = 0
        self.lease: tuple[int, int] | None = None
        self._at: list[int] = []
        self._next = 0
        self._views: dict[tuple, Any] = {}

    def lease_slots(self, signature: str, shape: str) -> None:
        """Lease slots in this rank's arena and exchange offsets; all ranks use the smallest slot size of any.

        Raises ShmError when no shared memory is left.
        """
        if self.lease is None:
            self.lease = self._lease_from_arena()
        self._publish_lease(*self.lease, signature, shape)

    def _publish_lease(self, offset: int, size: int, signature: str, shape: str) -> None:
        place = _PLACE.pack(offset, size // SLOTS)
        places = [_PLACE.unpack(p) for p in self._barrier.begin(signature, shape, place)]
        settled = [offset for offset, _ in places], min(size for _, size in places)
        if settled != (self._at, self.bytes):
            self._at, self.bytes = settled
            self._views.clear()

    def finish(self) -> None:
        """End an operation. Nothing to do for slots that the group keeps."""

    def _lease_from_arena(self) -> tuple[int, int]:
        arena = self._context.arena
        self._context.reclaim_memory()
        free = arena.largest_free_block()
        sixteenths = next(part for least, part in _KEPT if free >= least)
        size = SMALL_BYTES if self._small else _slot_bytes(sixteenths * free // 16)
        try:
            size = SLOTS * max(size, _MIN_BYTES)
            return arena.lease(size), size
        except ArenaFull as full:
            raise ShmError(
                f"no shared memory is left for {self._barrier}: {full}. Destroy groups that are not used any more, "
                "or make fewer"
            ) from None

    def next_slot_views(self, key: tuple, make: Callable[[list[Tensor]], Any]) -> Any:
        """Advance to the next slot and return `make(slots)`, given that slot of every rank as (bytes,) uint8.

        The result is cached under `key`: a training step repeats a few shapes, and making a view takes microseconds.
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

    def bytes_per_section(self) -> int:
        """Size of a section when a slot is divided into one section per rank."""
        return self.bytes // self._barrier.size // ALIGN * ALIGN


class BorrowedSlots(Slots):
    """Larger slots leased for a single operation; without free memory the operation uses `kept`, the group's own.

    It never waits for memory: two groups that wait for each other's would deadlock.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, memories: list[Tensor], kept: Slots):
        super().__init__(context, barrier, memories)
        self._kept = kept

    def should_borrow(self, need: int) -> bool:
        """Return whether larger slots would be faster for a message of `need` bytes. Equal on all ranks."""
        return self._kept.bytes < LARGE_BYTES and need > _MANY * self._kept.bytes

    def lease_slots(self, signature: str, shape: str) -> None:
        arena = self._context.arena
        size = SLOTS * _slot_bytes(5 * arena.largest_free_block() // 8)
        if size > self._kept.lease[1]:
            with contextlib.suppress(ArenaFull):  # another thread took the memory
                self.lease = arena.lease(size), size
        self._publish_lease(*(self.lease or self._kept.lease), signature, shape)

    def finish(self) -> None:
        """Wait until all ranks have read, then release the lease. After an error the group keeps the lease."""
        self._barrier.exchange()
        if self.lease is not None:
            self._context.arena.release(*self.lease)
            self.lease = None


def _slot_bytes(part: int) -> int:
    """Return the size of a slot when all three may take `part` bytes."""
    return min(LARGE_BYTES, part // SLOTS // _MIN_BYTES * _MIN_BYTES)


def slot_section(slot: Tensor, index: int, size: int, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the first `length` elements of section `index` of a slot, in sections of `size` bytes."""
    return slot[index * size : index * size + length * dtype.itemsize].view(dtype)
