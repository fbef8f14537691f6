"""Bytes of the shared-memory segments through which ranks of one machine communicate with the shm backend.

A page that several processes have touched counts for each of them in equal parts (PSS, as Linux reports it), so the sum
over all ranks is the machine's total. A process group has slots on every rank, three for small tensors and three for
large ones, each touched as far as its largest message reaches; a transfer has two buffers. The figures follow
`tools/shm/collectives` and `tools/shm/transfer` once every slot has been used, which takes a few steps. They are within
10 % unless one rank waits long for another; groups that find little free memory map less than is said here.
"""

from collections.abc import Iterator

from minidist.tools.estimate.layout import DTYPE_BYTES, Layout
from minidist.tools.estimate.traffic import Operation, Traffic
from minidist.tools.shm.sizes import (
    ALIGN,
    EAGER_BYTES,
    LARGE_BYTES,
    ONE_MEETING_BYTES,
    PIECE_BYTES,
    SLOTS,
    SMALL_BYTES,
    even_chunk_length,
)

PAGE = 4096
_SENT_IN_PARTS = ("reduce_scatter", "all_to_all")  # a different part for every other rank
_BROADCAST_AT_START = ("grads", "copies", "tensor", "activations")  # group specs that broadcast initial parameters


class TouchedSlots:
    """How much of a process group's slots of one size the ranks touch."""

    def __init__(self, group_size: int, slot_bytes: int):
        self.group_size, self.slot_bytes = group_size, slot_bytes
        self.counted_bytes = self.whole_reach = self.part_bytes = 0

    def add_whole(self, reach: int, counted_bytes: float) -> None:
        """A message that fills slots from their start up to `reach`. counted_bytes: this rank's PSS over all slots."""
        self.whole_reach = max(self.whole_reach, reach)
        self.counted_bytes = max(self.counted_bytes, counted_bytes)

    def total(self, group_rank: int) -> float:
        """Bytes that count for this rank.

        Of a message in parts every rank writes the parts of all others into its own slot and reads one part in each of
        theirs. Where a part overlaps whole messages it is counted already.
        """
        size = self.group_size
        section = self.slot_bytes // size // ALIGN * ALIGN
        more = [self.part_bytes - min(self.part_bytes, max(0, self.whole_reach - i * section)) for i in range(size)]
        written, read = sum(more) - more[group_rank], (size - 1) * more[group_rank]
        return SLOTS * (self.counted_bytes + (written + read) / 2)


def shared_segment_bytes(traffic: Traffic, rank: int) -> int:
    """Bytes of a rank; 0 with another backend. `auto` is taken for the CPU's choice."""
    config = traffic.layout.config
    backend, device = config.comm.backend, config.device
    if backend != "shm" and (backend != "auto" or device.startswith("cuda")):
        return 0
    slots: dict[tuple[str, bool], TouchedSlots] = {}
    transfers: dict[str, int] = {}
    for spec, name, elements, each in _messages(traffic, rank):
        group, nbytes = traffic.group_ranks(spec, rank), elements * each
        size = len(group)
        if name == "send":
            touched = _round_to_pages(min(nbytes, PIECE_BYTES)) if nbytes > EAGER_BYTES else 0
            transfers[spec] = max(transfers.get(spec, 0), touched)
            continue
        local = elements // size if name in ("all_gather", *_SENT_IN_PARTS) else elements
        need = size * (local * each + ALIGN) if name in _SENT_IN_PARTS else local * each
        small = need <= SMALL_BYTES
        at = slots.setdefault((spec, small), TouchedSlots(size, SMALL_BYTES if small else LARGE_BYTES))
        if name in _SENT_IN_PARTS:
            longest = at.slot_bytes // size // ALIGN * ALIGN // each
            at.part_bytes = max(at.part_bytes, _round_to_pages(min(local, even_chunk_length(local, longest)) * each))
            continue
        filled = _round_to_pages(min(local, even_chunk_length(local, at.slot_bytes // each)) * each)
        if name == "broadcast":  # written by one rank and read by every rank
            at.add_whole(0, filled / size)
        elif name == "all_gather" or nbytes * size <= ONE_MEETING_BYTES:  # every rank reads every slot in full
            at.add_whole(filled, filled)
        else:  # in slices, each written by one rank and read by another; all read the sum from the first rank's slots
            at.add_whole(filled, filled * (2 * size - 1 if group.index(rank) else size + 1) / (2 * size))
    touched = sum(each.total(traffic.group_ranks(spec, rank).index(rank)) for (spec, _), each in slots.items())
    return round(touched + sum(transfers.values()))


def _messages(traffic: Traffic, rank: int) -> Iterator[Operation]:
    """The operations of a step, and the broadcast of the initial parameters."""
    for operation in traffic.operations(rank):
        if len(traffic.group_ranks(operation[0], rank)) > 1:
            yield operation
    for spec in _BROADCAST_AT_START:
        if len(traffic.group_ranks(spec, rank)) > 1:
            for numel in _parameter_sizes(traffic.layout):
                yield spec, "broadcast", numel, DTYPE_BYTES["float32"]


def _parameter_sizes(layout: Layout) -> list[int]:
    """Elements of each kind of parameter, unsharded."""
    model = layout.config.model
    hidden, heads = model.hidden_size, model.num_kv_heads * model.head_dim
    return [model.vocab_size * hidden, hidden * hidden, heads * hidden, model.intermediate_size * hidden, hidden]


def _round_to_pages(count: float) -> int:
    return -(-int(count) // PAGE) * PAGE
