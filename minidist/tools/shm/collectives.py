"""The collectives of one group, over slots of shared memory. All of them block; `operation_queue` chooses the thread.

A small tensor takes one barrier: every rank writes its slot, all ranks pass the barrier, every rank reads what it
needs. A larger tensor is streamed in chunks with one barrier each. In an all-reduce each rank reduces its own slice of
every chunk (Rabenseifner's reduce-scatter and all-gather, Thakur et al. 2005, section 4.5, with shared memory as the
network), so the additions are divided among the ranks, and each element is still summed in rank order.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.comm.wire_bytes import chunk_sizes
from minidist.tools.shm.barrier import GroupBarrier, ShmError
from minidist.tools.shm.process_context import ProcessContext
from minidist.tools.shm.reduce import Reduction
from minidist.tools.shm.sizes import SINGLE_BARRIER_BYTES, SMALL_BYTES, even_chunk_length
from minidist.tools.shm.slots import Slots, TemporarySlots, view_slot_section

Fill = Callable[[list[Tensor], int, int], None]  # (slot of every rank, begin and end of the chunk in elements)


class Collectives:
    """The blocking collectives of one process group over shared memory. Ranks and roots are group ranks.

    All ranks of the group call the same methods in the same order, with flat (one-dimensional) CPU tensors. signature:
    operation, dtype and size as text, such as "all_reduce sum float32 6"; the methods raise ShmError if it differs
    between ranks. shape: the tensor's shape as text, only for that error message.

    context: the `ProcessContext` of this process. barrier: the connections to the other ranks. memories: the shared
    memory (`Arena`) of each group rank, (bytes,) uint8.
    """

    def __init__(self, context: ProcessContext, barrier: GroupBarrier, memories: list[Tensor]):
        self.barrier, self.rank, self.size = barrier, barrier.rank, barrier.size
        self._small = Slots(context, barrier, memories, small=True)
        self._large = Slots(context, barrier, memories)
        self._temporary = TemporarySlots(context, barrier, memories, self._large)

    @property
    def leased_blocks(self) -> list[tuple[int, int]]:
        """The blocks of this rank's shared memory (`Arena`) that the group has reserved, as (offset, size) in bytes."""
        return [slots.lease for slots in (self._small, self._large, self._temporary) if slots.lease]

    def run_barrier(self) -> None:
        """Block until all ranks of the group have called this method. Collective."""
        self.barrier.begin_operation("barrier")

    # -- reductions ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self, flat: Tensor, reduction: Reduction, signature: str, shape: str, root: int | None = None
    ) -> None:
        """Reduce `flat` (n,) element-wise over the ranks, in place and in rank order. Collective; blocks.

        root: the only group rank whose `flat` receives the result; None: all ranks. signature, shape: operation and
        tensor as text, for checks and error messages (see `Collectives`).
        """
        slots = self._choose_slots(flat.nbytes, signature, shape)
        if self.size == 1 or (flat.nbytes * self.size <= SINGLE_BARRIER_BYTES and flat.nbytes <= slots.bytes):
            n = flat.nbytes
            parts = slots.next_slot_views((n, flat.dtype), lambda every: [slot[:n].view(flat.dtype) for slot in every])
            parts[self.rank].copy_(flat)
            self.barrier.begin_operation(signature, shape)
            if root in (None, self.rank):
                reduction.reduce_into(parts, flat)
            slots.release_slots()
        else:
            self._all_reduce_in_slices(slots, flat, reduction, signature, shape, root)

    def _all_reduce_in_slices(
        self, slots: Slots, flat: Tensor, reduction: Reduction, signature: str, shape: str, root: int | None
    ) -> None:
        """All-reduce a large tensor in chunks: each rank reduces its own slice of every chunk. Collective.

        slots: through which the chunks pass. flat, reduction, signature, shape, root: as in `all_reduce`.
        """
        me = self.rank

        def fill(piece: "_Chunk") -> tuple["_Chunk", "_SlotViews"]:
            """Copy a chunk into this rank's slot, except for the slice that this rank reduces itself."""
            n = piece.whole.numel()
            shared = slots.next_slot_views(
                ("slices", n, flat.dtype), lambda every: _view_slots(every, n, flat.dtype, me)
            )
            for target, part in zip(shared.peers, piece.peers, strict=True):
                target.copy_(part)
            return piece, shared

        first, *rest = _split_into_chunks(flat, slots.bytes // flat.itemsize, self.size, me)
        filled = fill(first)
        self.barrier.begin_operation(signature, shape)
        for following in [*rest, None]:
            piece, shared = filled
            parts = [*shared.slices[:me], piece.own, *shared.slices[me + 1 :]]
            reduction.reduce_into(
                parts, shared.slices[0]
            )  # into the slot of rank 0, where the whole chunk is read at once
            filled = fill(following) if following is not None else None
            self.barrier.exchange()
            if root in (None, me):
                piece.whole.copy_(shared.whole)
        slots.release_slots()

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction, signature: str, shape: str
    ) -> None:
        """Reduce `inputs[i]` (n,) of all ranks, in rank order, into `output` (n,) of rank i. Collective; blocks.

        signature, shape: operation and tensor as text, for checks and error messages (see `Collectives`).
        """
        dtype, own = output.dtype, inputs[self.rank]
        aliased = own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        overwritten = aliased and self.rank > 1  # partial sums are in the output before this rank's part is read

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs):
                if i != self.rank:
                    view_slot_section(slots[self.rank], i, size, end - begin, dtype).copy_(part[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            parts = [view_slot_section(slot, self.rank, size, end - begin, dtype) for slot in slots]
            parts[self.rank] = own[begin:end].clone() if overwritten else own[begin:end]
            reduction.reduce_into(parts, output[begin:end])

        slots = self._choose_slots(self.size * (output.nbytes + 64), signature, shape)
        size = slots.section_bytes_per_rank()
        self._stream(slots, output.numel(), size // output.itemsize, fill, drain, signature, shape)

    # -- copies; all tensors are bytes --------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, signature: str, shape: str) -> None:
        """Copy `flat` (n,) uint8 of group rank `root` into `flat` of all other ranks. Collective; blocks.

        signature, shape: operation and tensor as text, for checks and error messages (see `Collectives`).
        """

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank == root:
                slots[root][: end - begin].copy_(flat[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank != root:
                flat[begin:end].copy_(slots[root][: end - begin])

        slots = self._choose_slots(flat.numel(), signature, shape)
        self._stream(slots, flat.numel(), slots.bytes, fill, drain, signature, shape)

    def all_gather(
        self, outputs: Sequence[Tensor] | None, own: Tensor, signature: str, shape: str, root: int | None = None
    ) -> None:
        """Copy `own` (n,) uint8 of rank i to `outputs[i]` (n,) of every rank. Collective; blocks.

        root: the only group rank that receives; None: all ranks. outputs: one tensor per rank, None on a rank that does
        not receive. signature, shape: operation and tensor as text, for checks and error messages (see `Collectives`).
        """

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank != root:
                slots[self.rank][: end - begin].copy_(own[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            if root in (None, self.rank):
                for i, output in enumerate(outputs):
                    output[begin:end].copy_(own[begin:end] if i == self.rank else slots[i][: end - begin])

        slots = self._choose_slots(own.numel(), signature, shape)
        self._stream(slots, own.numel(), slots.bytes, fill, drain, signature, shape)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, root: int, signature: str, shape: str) -> None:
        """Copy `inputs[i]` (n,) uint8 of group rank `root` to `output` (n,) of rank i. Collective; blocks.

        inputs: one tensor per rank, None on other ranks than `root`. signature, shape: operation and tensor as text,
        for checks and error messages (see `Collectives`).
        """

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs) if self.rank == root else ():
                if i != root:
                    view_slot_section(slots[root], i, size, end - begin).copy_(part[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            mine = (
                inputs[root][begin:end]
                if self.rank == root
                else view_slot_section(slots[root], self.rank, size, end - begin)
            )
            output[begin:end].copy_(mine)

        slots = self._choose_slots(self.size * (output.numel() + 64), signature, shape)
        size = slots.section_bytes_per_rank()
        self._stream(slots, output.numel(), size, fill, drain, signature, shape)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], signature: str) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j, for all i and j. Collective; blocks.

        outputs, inputs: one flat uint8 tensor per rank, of any lengths; raises ShmError if the lengths of a pair
        differ. signature: operation and dtype as text, equal on all ranks.
        """
        sizes = b"".join(part.numel().to_bytes(8, "little") for part in inputs)
        received = self.barrier.begin_operation(signature, "", sizes)
        table = [[int.from_bytes(row[8 * i : 8 * i + 8], "little") for i in range(self.size)] for row in received]
        for i, output in enumerate(outputs):
            if table[i][self.rank] != output.numel():
                raise self._abort_with_error(
                    f"rank {self.barrier.ranks[i]} has {table[i][self.rank]} bytes for rank "
                    f"{self.barrier.ranks[self.rank]}, which expects {output.numel()}: {signature} of {self.barrier}"
                )
        outputs[self.rank].copy_(inputs[self.rank])

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs):
                if i != self.rank and (part := part[begin:end]).numel():
                    view_slot_section(slots[self.rank], i, size, part.numel()).copy_(part)

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            for i, output in enumerate(outputs):
                if i != self.rank and (output := output[begin:end]).numel():
                    output.copy_(view_slot_section(slots[i], self.rank, size, output.numel()))

        longest = max(max(row) for row in table)
        slots = self._choose_slots(self.size * (longest + 64), signature, "")
        size = slots.section_bytes_per_rank()
        self._stream(slots, longest, size, fill, drain, signature, "")

    # -- the common part ----------------------------------------------------------------------------------------------

    def _stream(self, slots: Slots, n: int, step: int, fill: Fill, drain: Fill, signature: str, shape: str) -> None:
        """Fill a slot, pass a barrier, drain the slots: once for each chunk of at most `step` of `n` elements."""
        step = even_chunk_length(n, step)
        for begin in range(0, max(n, 1), step):
            turn, end = slots.next_slot_views((), lambda every: every), min(begin + step, n)
            fill(turn, begin, end)
            if begin == 0:
                self.barrier.begin_operation(signature, shape)
            else:
                self.barrier.exchange()
            drain(turn, begin, end)
        slots.release_slots()

    def _choose_slots(self, need: int, signature: str, shape: str) -> Slots:
        """Choose the slots for a message of `need` bytes: small, large or temporary. All ranks make the same choice."""
        slots = self._small if need <= SMALL_BYTES else self._large
        if not slots.bytes:
            slots.lease_slots(signature, shape)
        if slots is self._large and self._temporary.is_worthwhile(need):
            slots = self._temporary
            slots.lease_slots(signature, shape)
        return slots

    def _abort_with_error(self, reason: str) -> ShmError:
        """Abort the group on all ranks with an error that only this rank can detect, and return that error."""
        self.barrier.abort(reason)
        return ShmError(reason)


class _Chunk(NamedTuple):
    """A part of a tensor that goes through a slot at once.

    whole: all of it. own: the slice that this rank reduces. peers: the parts before and behind `own`.
    """

    whole: Tensor
    own: Tensor  # the slice that this rank reduces
    peers: Sequence[Tensor]  # the parts before and behind `own` that are not empty


class _SlotViews(NamedTuple):
    """Views of the slots that a `_Chunk` goes through.

    whole: the chunk in the first rank's slot, for the results. slices: this rank's slice in the slot of every rank.
    peers: the rest of the chunk in this rank's slot.
    """

    whole: Tensor  # the whole chunk, in the slot of rank 0
    slices: list[Tensor]  # this rank's slice, in the slot of each rank
    peers: Sequence[Tensor]  # the other ranks' slices, in this rank's slot


def _split_into_chunks(flat: Tensor, length: int, size: int, rank: int) -> Iterator[_Chunk]:
    """Split a tensor into as few chunks of at most `length` elements as possible, with few calls of torch."""
    length = even_chunk_length(flat.numel(), length)
    full = flat.numel() // length * length
    for rows in (flat[:full].view(-1, length), flat[full:].view(1, -1)):
        if rows.numel():
            own, peers = _own_slice_and_rest(rows, size, rank)
            columns = rows.unbind(), own.unbind(), zip(*[part.unbind() for part in peers], strict=True)
            yield from map(_Chunk._make, zip(*columns, strict=True))


def _view_slots(slots: list[Tensor], n: int, dtype: torch.dtype, rank: int) -> _SlotViews:
    """Return the views of the slots for a chunk of `n` elements. rank: this group rank, which owns a slice."""
    wholes = [slot[: n * dtype.itemsize].view(dtype) for slot in slots]
    cut = [_own_slice_and_rest(whole, len(slots), rank) for whole in wholes]
    return _SlotViews(wholes[0], [own for own, _ in cut], cut[rank][1])


def _own_slice_and_rest(tensor: Tensor, size: int, rank: int) -> tuple[Tensor, list[Tensor]]:
    """Return a rank's slice of the last dimension, and the parts before and behind it."""
    lengths = chunk_sizes(tensor.shape[-1], size)
    begin = sum(lengths[:rank])
    end, n = begin + lengths[rank], tensor.shape[-1]
    peers = [tensor.narrow(-1, at, to - at) for at, to in ((0, begin), (end, n)) if to > at]
    return tensor.narrow(-1, begin, end - begin), peers
