"""The collectives of one group over its slots. All of them block; `lane` decides in which thread.

A small tensor takes one meeting: every rank writes, all meet, every rank reads what it needs. A larger one goes in
chunks, one meeting each. In an all-reduce a rank reduces its own slice of each chunk (Rabenseifner's
reduce-scatter and all-gather, Thakur et al. 2005, section 4.5, with shared memory for the network), so the work of a
sum is shared out and every element is still added in the order of the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.comm.wire_bytes import chunks
from minidist.tools.shm.neighbours import Neighbours
from minidist.tools.shm.reduce import Reduction
from minidist.tools.shm.rendezvous import Meeting, ShmError
from minidist.tools.shm.sizes import ONE_MEETING_BYTES, SMALL_BYTES, even
from minidist.tools.shm.slots import BorrowedSlots, Slots, section

Fill = Callable[[list[Tensor], int, int], None]  # (slot of every rank, begin, end)


class Collectives:
    """What the ranks of a group do together. Tensors are flat; `told` is what must agree besides the operation."""

    def __init__(self, here: Neighbours, meeting: Meeting, memories: list[Tensor]):
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self._small = Slots(here, meeting, memories, small=True)
        self._large = Slots(here, meeting, memories)
        self._borrowed = BorrowedSlots(here, meeting, memories, self._large)

    @property
    def leases(self) -> list[tuple[int, int]]:
        return [slots.lease for slots in (self._small, self._large, self._borrowed) if slots.lease]

    def barrier(self) -> None:
        self.meeting.begin("barrier")

    # -- reductions ---------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, how: Reduction, told: str, shown: str, root: int | None = None) -> None:
        """Reduce `flat` (n,) in place on every rank, or on `root` only."""
        slots = self._fitting(flat.nbytes, told, shown)
        if self.size == 1 or (flat.nbytes * self.size <= ONE_MEETING_BYTES and flat.nbytes <= slots.bytes):
            n = flat.nbytes
            parts = slots.turn((n, flat.dtype), lambda every: [slot[:n].view(flat.dtype) for slot in every])
            parts[self.rank].copy_(flat)
            self.meeting.begin(told, shown)
            if root in (None, self.rank):
                how.reduce(parts, flat)
            slots.finish()
        else:
            self._all_reduce_in_slices(slots, flat, how, told, shown, root)

    def _all_reduce_in_slices(
        self, slots: Slots, flat: Tensor, how: Reduction, told: str, shown: str, root: int | None
    ) -> None:
        me = self.rank

        def fill(piece: "_Piece") -> tuple["_Piece", "_Shared"]:
            """Put a piece into this rank's slot, all but the slice that this rank reduces."""
            n = piece.whole.numel()
            shared = slots.turn(("slices", n, flat.dtype), lambda every: _shared(every, n, flat.dtype, me))
            for target, part in zip(shared.others, piece.others, strict=True):
                target.copy_(part)
            return piece, shared

        first, *rest = _pieces(flat, slots.bytes // flat.itemsize, self.size, me)
        filled = fill(first)
        self.meeting.begin(told, shown)
        for following in [*rest, None]:
            piece, shared = filled
            parts = [*shared.slices[:me], piece.own, *shared.slices[me + 1 :]]
            how.reduce(parts, shared.slices[0])  # all in the slot of rank 0, where the whole can be read at once
            filled = fill(following) if following is not None else None
            self.meeting.meet()
            if root in (None, me):
                piece.whole.copy_(shared.whole)
        slots.finish()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], how: Reduction, told: str, shown: str) -> None:
        """Reduce part i of all ranks (`inputs[i]`, (n,)) into `output` (n,) of rank i."""
        dtype, own = output.dtype, inputs[self.rank]
        shares = own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        read_late = shares and self.rank > 1  # when there are sums in the output already

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs):
                if i != self.rank:
                    section(slots[self.rank], i, size, end - begin, dtype).copy_(part[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            parts = [section(slot, self.rank, size, end - begin, dtype) for slot in slots]
            parts[self.rank] = own[begin:end].clone() if read_late else own[begin:end]
            how.reduce(parts, output[begin:end])

        slots = self._fitting(self.size * (output.nbytes + 64), told, shown)
        size = slots.section_bytes()
        self._stream(slots, output.numel(), size // output.itemsize, fill, drain, told, shown)

    # -- copies; all tensors are bytes --------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, told: str, shown: str) -> None:
        """Copy `flat` (n,) of `root` to all ranks."""

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank == root:
                slots[root][: end - begin].copy_(flat[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank != root:
                flat[begin:end].copy_(slots[root][: end - begin])

        slots = self._fitting(flat.numel(), told, shown)
        self._stream(slots, flat.numel(), slots.bytes, fill, drain, told, shown)

    def all_gather(
        self, outputs: Sequence[Tensor] | None, own: Tensor, told: str, shown: str, root: int | None = None
    ) -> None:
        """Copy `own` (n,) of rank i to `outputs[i]` of every rank, or of `root` only."""

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            if self.rank != root:
                slots[self.rank][: end - begin].copy_(own[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            if root in (None, self.rank):
                for i, output in enumerate(outputs):
                    output[begin:end].copy_(own[begin:end] if i == self.rank else slots[i][: end - begin])

        slots = self._fitting(own.numel(), told, shown)
        self._stream(slots, own.numel(), slots.bytes, fill, drain, told, shown)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, root: int, told: str, shown: str) -> None:
        """Copy `inputs[i]` (n,) of `root` to `output` of rank i."""

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs) if self.rank == root else ():
                if i != root:
                    section(slots[root], i, size, end - begin).copy_(part[begin:end])

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            mine = inputs[root][begin:end] if self.rank == root else section(slots[root], self.rank, size, end - begin)
            output[begin:end].copy_(mine)

        slots = self._fitting(self.size * (output.numel() + 64), told, shown)
        size = slots.section_bytes()
        self._stream(slots, output.numel(), size, fill, drain, told, shown)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], told: str) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. The lengths may all differ."""
        sizes = b"".join(part.numel().to_bytes(8, "little") for part in inputs)
        heard = self.meeting.begin(told, "", sizes)
        table = [[int.from_bytes(row[8 * i : 8 * i + 8], "little") for i in range(self.size)] for row in heard]
        for i, output in enumerate(outputs):
            if table[i][self.rank] != output.numel():
                raise self._refuse(
                    f"rank {self.meeting.ranks[i]} has {table[i][self.rank]} bytes for rank "
                    f"{self.meeting.ranks[self.rank]}, which expects {output.numel()}: {told} of {self.meeting}"
                )
        outputs[self.rank].copy_(inputs[self.rank])

        def fill(slots: list[Tensor], begin: int, end: int) -> None:
            for i, part in enumerate(inputs):
                if i != self.rank and (part := part[begin:end]).numel():
                    section(slots[self.rank], i, size, part.numel()).copy_(part)

        def drain(slots: list[Tensor], begin: int, end: int) -> None:
            for i, output in enumerate(outputs):
                if i != self.rank and (output := output[begin:end]).numel():
                    output.copy_(section(slots[i], self.rank, size, output.numel()))

        longest = max(max(row) for row in table)
        slots = self._fitting(self.size * (longest + 64), told, "")
        size = slots.section_bytes()
        self._stream(slots, longest, size, fill, drain, told, "")

    # -- the common part ----------------------------------------------------------------------------------------------

    def _stream(self, slots: Slots, n: int, step: int, fill: Fill, drain: Fill, told: str, shown: str) -> None:
        """Fill a slot, meet, drain the slots; as often as `n` elements take in steps of `step`, once at least."""
        step = even(n, step)
        for begin in range(0, max(n, 1), step):
            turn, end = slots.turn((), lambda every: every), min(begin + step, n)
            fill(turn, begin, end)
            if begin == 0:
                self.meeting.begin(told, shown)
            else:
                self.meeting.meet()
            drain(turn, begin, end)
        slots.finish()

    def _fitting(self, need: int, told: str, shown: str) -> Slots:
        """The slots for `need` bytes at a time. All ranks need the same and so take the same."""
        slots = self._small if need <= SMALL_BYTES else self._large
        if not slots.bytes:
            slots.agree(told, shown)
        if slots is self._large and self._borrowed.worth(need):
            slots = self._borrowed
            slots.agree(told, shown)
        return slots

    def _refuse(self, why: str) -> ShmError:
        """An error that only this rank can see: the others must not wait for it."""
        self.meeting.break_off(why)
        return ShmError(why)


class _Piece(NamedTuple):
    """Part of a tensor that goes through a slot at once."""

    whole: Tensor
    own: Tensor  # the slice of it that this rank reduces
    others: Sequence[Tensor]  # what lies before and behind that, where there is anything


class _Shared(NamedTuple):
    """The same in the slots."""

    whole: Tensor  # in the slot of rank 0
    slices: list[Tensor]  # this rank's slice in the slot of each rank
    others: Sequence[Tensor]  # in this rank's slot


def _pieces(flat: Tensor, length: int, size: int, rank: int) -> Iterator[_Piece]:
    """Views of at most `length` elements, and as few. Made row by row of a matrix, in few calls."""
    length = even(flat.numel(), length)
    full = flat.numel() // length * length
    for rows in (flat[:full].view(-1, length), flat[full:].view(1, -1)):
        if rows.numel():
            own, others = _around(rows, size, rank)
            columns = rows.unbind(), own.unbind(), zip(*[part.unbind() for part in others], strict=True)
            yield from map(_Piece._make, zip(*columns, strict=True))


def _shared(slots: list[Tensor], n: int, dtype: torch.dtype, rank: int) -> _Shared:
    wholes = [slot[: n * dtype.itemsize].view(dtype) for slot in slots]
    cut = [_around(whole, len(slots), rank) for whole in wholes]
    return _Shared(wholes[0], [own for own, _ in cut], cut[rank][1])


def _around(tensor: Tensor, size: int, rank: int) -> tuple[Tensor, list[Tensor]]:
    """A rank's slice of the last dimension, and what lies before and behind it."""
    lengths = chunks(tensor.shape[-1], size)
    begin = sum(lengths[:rank])
    end, n = begin + lengths[rank], tensor.shape[-1]
    others = [tensor.narrow(-1, at, to - at) for at, to in ((0, begin), (end, n)) if to > at]
    return tensor.narrow(-1, begin, end - begin), others
