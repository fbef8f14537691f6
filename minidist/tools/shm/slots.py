"""The slots of a group: three buffers, used in turn, in the arena (the shared memory) of each of the group's ranks.

One barrier separates filling a slot from reading it. While other ranks still read slot k, slots k+1 and k+2 are filled:
with three slots one barrier per chunk is enough, also for an all-reduce, whose slots are read twice. Each operation
continues with the slot after the last one used, so it never begins in a slot that a slower rank still reads.

The first groups that send large tensors keep large slots. Later groups keep small ones, and lease larger
temporary slots for one operation at a time when the message would take many chunks. That costs two barriers: one
before the operation, to publish the offsets, and one after it, when no rank reads the memory any more.
"""

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist.tools.shm.arena import ArenaFullError
from minidist.tools.shm.barrier import GroupBarrier, ShmError
from minidist.tools.shm.process_context import ProcessContext
from minidist.tools.shm.sizes import ALIGN, LARGE_BYTES, SLOTS, SMALL_BYTES

_MIN_BYTES = 4096
_KEPT_SIXTEENTHS = ((4 * 2**20, 10), (5 * 2**19, 6), (0, 1))  # (free bytes, sixteenths of them that a group keeps)
_MIN_CHUNKS_FOR_TEMPORARY = 4  # chunks: as long as two barriers
_MAX_VIEWS = 256
_PLACE = struct.Struct("<QQ")


class Slots:
    """Three equal buffers ("slots") per rank in shared memory, through which the collectives of a group pass data.

    context: the `ProcessContext` of this process. barrier: the connections to the other ranks. memories: the shared
    memory (`Arena`) of each group rank, (bytes,) uint8. small: make slots for small tensors only.
    bytes: the size of one slot, equal on all ranks; 0 before `lease_slots`. lease: (offset, size) in bytes of this
    rank's three slots in its arena; None while it has none.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, memories: list[Tensor], small: bool = False):
        self._context, self._barrier, self._memories, self._small = context, barrier, memories, small
        self.bytes = 0
        self.lease: tuple[int, int] | None = None
        self._offsets: list[int] = []
        self._next = 0
        self._views: dict[tuple, Any] = {}

    def lease_slots(self, signature: str, shape: str) -> None:
        """Reserve this rank's three slots in shared memory, if it has none; exchange offsets with all ranks.

        Collective. All ranks then use the smallest slot size of any rank. signature, shape: operation and tensor as
        text, for checks and error messages (see `GroupBarrier.begin_operation`). Raises ShmError if no shared memory is
        left.
        """
        if self.lease is None:
            self.lease = self._lease_from_arena()
        self._exchange_offsets(*self.lease, signature, shape)

    def _exchange_offsets(self, offset: int, size: int, signature: str, shape: str) -> None:
        """Exchange offsets and sizes of the slots with all ranks; use the smallest slot size. Collective.

        offset, size: of this rank's three slots together, in bytes. signature, shape: as in `lease_slots`.
        """
        place = _PLACE.pack(offset, size // SLOTS)
        places = [_PLACE.unpack(p) for p in self._barrier.begin_operation(signature, shape, place)]
        agreed = [offset for offset, _ in places], min(size for _, size in places)
        if agreed != (self._offsets, self.bytes):
            self._offsets, self.bytes = agreed
            self._views.clear()

    def release_slots(self) -> None:
        """Do nothing: the group keeps these slots for its next operation. `TemporarySlots` releases its slots here."""

    def _lease_from_arena(self) -> tuple[int, int]:
        """Reserve this rank's three slots in its arena; return (offset, size) in bytes.

        Raises ShmError if no shared memory is left.
        """
        arena = self._context.arena
        self._context.reclaim_memory()
        free = arena.largest_free_block_bytes()
        sixteenths = next(part for min_free, part in _KEPT_SIXTEENTHS if free >= min_free)
        size = SMALL_BYTES if self._small else _slot_bytes(sixteenths * free // 16)
        try:
            size = SLOTS * max(size, _MIN_BYTES)
            return arena.lease_block(size), size
        except ArenaFullError as full:
            raise ShmError(
                f"no shared memory is left for {self._barrier}: {full}. Destroy groups that are not used any more, "
                "or make fewer"
            ) from None

    def next_slot_views(self, key: tuple, make_views: Callable[[list[Tensor]], Any]) -> Any:
        """Advance every rank's slots to the next of the three; return views of them, made by `make_views`.

        make_views: takes a list with this slot of every group rank, each (bytes,) uint8, and returns views of these
        tensors. The views are cached under `key`, because a training step repeats a few shapes and making a view takes
        microseconds.
        """
        key = (self._next, *key)
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            begin = self._next * self.bytes
            pairs = zip(self._memories, self._offsets, strict=True)
            self._views[key] = make_views([memory[at + begin : at + begin + self.bytes] for memory, at in pairs])
        self._next = (self._next + 1) % SLOTS
        return self._views[key]

    def section_bytes_per_rank(self) -> int:
        """Return the size in bytes, a multiple of 64, of a section if a slot is divided equally among the ranks."""
        return self.bytes // self._barrier.size // ALIGN * ALIGN


class TemporarySlots(Slots):
    """Larger slots (buffers in shared memory) that a process group reserves for one operation on a large tensor.

    context, barrier, memories: as for `Slots`. kept: the slots that the group keeps; the operation uses them if no
    larger block is free. Reserving never waits for memory: two groups that wait for each other's memory would deadlock.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, memories: list[Tensor], kept: Slots):
        super().__init__(context, barrier, memories)
        self._kept = kept

    def is_worthwhile(self, message_bytes: int) -> bool:
        """Return whether larger slots would make a message of this size faster. All ranks get the same answer."""
        return self._kept.bytes < LARGE_BYTES and message_bytes > _MIN_CHUNKS_FOR_TEMPORARY * self._kept.bytes

    def lease_slots(self, signature: str, shape: str) -> None:
        """Reserve larger slots in shared memory, if there is room; exchange offsets with all ranks. Collective.

        All ranks then use the smallest slot size of any rank. signature, shape: operation and tensor as text, for
        checks and error messages (see `GroupBarrier.begin_operation`).
        """
        arena = self._context.arena
        size = SLOTS * _slot_bytes(5 * arena.largest_free_block_bytes() // 8)
        if size > self._kept.lease[1]:
            with contextlib.suppress(ArenaFullError):  # another thread took the memory
                self.lease = arena.lease_block(size), size
        self._exchange_offsets(*(self.lease or self._kept.lease), signature, shape)

    def release_slots(self) -> None:
        """Wait until all ranks have read the slots, then release this rank's. Collective."""
        self._barrier.exchange()
        if self.lease is not None:
            self._context.arena.release_block(*self.lease)
            self.lease = None


def _slot_bytes(part: int) -> int:
    """Return the size in bytes of one slot if the three slots together may take `part` bytes."""
    return min(LARGE_BYTES, part // SLOTS // _MIN_BYTES * _MIN_BYTES)


def view_slot_section(
    slot: Tensor, index: int, section_bytes: int, numel: int, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Return a view (numel,) of the first elements of section `index` of a slot.

    slot: a buffer in shared memory, (bytes,) uint8, divided into sections of `section_bytes`. dtype: of the view.
    """
    begin = index * section_bytes
    return slot[begin : begin + numel * dtype.itemsize].view(dtype)
