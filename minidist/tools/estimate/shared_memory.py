"""Bytes of the shared-memory segments through which ranks of one machine communicate with the shm backend.

A page that several processes have touched counts for each of them in equal parts (PSS, as Linux reports it), so the sum
over all ranks is the machine's total. Every rank of a process group has slots (buffers into which it writes its
messages), three for small tensors and three for large ones, each touched up to the end of its largest message; a
transfer (send and receive) has two buffers. The figures follow `tools/shm/collectives` and `tools/shm/transfer` once
every slot has been used, which takes a few steps. They are within 10 % unless one rank waits long for another; a group
that is created while little memory is free maps less.
"""

from collections.abc import Iterator

from minidist.tools.estimate.layout import DTYPE_BYTES, RunLayout
from minidist.tools.estimate.traffic import Operation, Traffic
from minidist.tools.shm.sizes import (
    ALIGN,
    EAGER_BYTES,
    LARGE_BYTES,
    SINGLE_BARRIER_BYTES,
    SLOTS,
    SMALL_BYTES,
    TRANSFER_CHUNK_BYTES,
    even_chunk_length,
)

PAGE = 4096
_PARTITIONED = ("reduce_scatter", "all_to_all")  # a different part of the message for every other rank
# Group specs that broadcast initial parameters.
_BROADCAST_AT_START = ("outer", "grads", "shard_replicas", "tensor", "activations")


class _TouchedSlots:
    """Counts the bytes that the ranks of a process group touch in its shared-memory slots of one size.

    group_size: the number of ranks in the group. slot_bytes: the size of a slot.
    """

    def __init__(self, group_size: int, slot_bytes: int):
        self.group_size, self.slot_bytes = group_size, slot_bytes
        self.full_message_pss = self.full_message_end = self.part_bytes = 0

    def add_full_message(self, end_byte: int, pss_bytes: float) -> None:
        """Count a message that other ranks read in full.

        end_byte: the message touches a slot from its begin to this byte. pss_bytes: this rank's part (PSS) of the bytes
        that the message touches, summed over the slots of all ranks.
        """
        self.full_message_end = max(self.full_message_end, end_byte)
        self.full_message_pss = max(self.full_message_pss, pss_bytes)

    def pss_bytes(self, group_rank: int) -> float:
        """Return this rank's part (PSS) of the bytes touched in all slots. group_rank: the rank's index in the group.

        A partitioned message has a different part for each other rank: a rank writes these parts into its own slot, and
        reads one part from the slot of each other rank. Bytes that full messages touch too are counted once.
        """
        size = self.group_size
        section = self.slot_bytes // size // ALIGN * ALIGN
        parts = [
            self.part_bytes - min(self.part_bytes, max(0, self.full_message_end - i * section)) for i in range(size)
        ]
        written, read = sum(parts) - parts[group_rank], (size - 1) * parts[group_rank]
        return SLOTS * (self.full_message_pss + (written + read) / 2)


def shared_segment_bytes(traffic: Traffic, rank: int) -> int:
    """Return the shared memory, in bytes, that counts for this rank with the shm backend; 0 with any other backend.

    The bytes are a proportional set size (PSS): a page that n processes have touched counts 1/n for each of them. The
    backend `auto` means shm unless the device is CUDA.
    """
    config = traffic.layout.config
    backend, device = config.comm.backend, config.device
    if backend != "shm" and (backend != "auto" or device.startswith("cuda")):
        return 0
    slots: dict[tuple[str, bool], _TouchedSlots] = {}
    transfers: dict[str, int] = {}
    for spec, name, elements, element_bytes in _messages(traffic, rank):
        group, nbytes = traffic.group_ranks(spec, rank), elements * element_bytes
        size = len(group)
        if name == "send":
            touched = _round_to_pages(min(nbytes, TRANSFER_CHUNK_BYTES)) if nbytes > EAGER_BYTES else 0
            transfers[spec] = max(transfers.get(spec, 0), touched)
            continue
        local = elements // size if name in ("all_gather", *_PARTITIONED) else elements
        need = size * (local * element_bytes + ALIGN) if name in _PARTITIONED else local * element_bytes
        small = need <= SMALL_BYTES
        touched_slots = slots.setdefault((spec, small), _TouchedSlots(size, SMALL_BYTES if small else LARGE_BYTES))
        if name in _PARTITIONED:
            longest = touched_slots.slot_bytes // size // ALIGN * ALIGN // element_bytes
            part_bytes = _round_to_pages(min(local, even_chunk_length(local, longest)) * element_bytes)
            touched_slots.part_bytes = max(touched_slots.part_bytes, part_bytes)
            continue
        longest = touched_slots.slot_bytes // element_bytes
        filled = _round_to_pages(min(local, even_chunk_length(local, longest)) * element_bytes)
        if name == "broadcast":  # written by one rank and read by every rank
            touched_slots.add_full_message(0, filled / size)
        elif name == "all_gather" or nbytes * size <= SINGLE_BARRIER_BYTES:  # every rank reads every slot in full
            touched_slots.add_full_message(filled, filled)
        else:  # in slices, each written by one rank and read by another; all read the sum from the first rank's slots
            pss = filled * (2 * size - 1 if group.index(rank) else size + 1) / (2 * size)
            touched_slots.add_full_message(filled, pss)
    pss = sum(touched.pss_bytes(traffic.group_ranks(spec, rank).index(rank)) for (spec, _), touched in slots.items())
    return round(pss + sum(transfers.values()))


def _messages(traffic: Traffic, rank: int) -> Iterator[Operation]:
    """Yield the operations of a step, and the broadcast of the initial parameters."""
    for operation in traffic.operations(rank):
        if len(traffic.group_ranks(operation[0], rank)) > 1:
            yield operation
    for spec in _BROADCAST_AT_START:
        if len(traffic.group_ranks(spec, rank)) > 1:
            for numel in _parameter_sizes(traffic.layout):
                yield spec, "broadcast", numel, DTYPE_BYTES["float32"]


def _parameter_sizes(layout: RunLayout) -> list[int]:
    """Return the unsharded sizes of all parameters, in elements."""
    model = layout.config.model
    hidden, heads = model.hidden_size, model.num_kv_heads * model.head_dim
    return [model.vocab_size * hidden, hidden * hidden, heads * hidden, model.intermediate_size * hidden, hidden]


def _round_to_pages(count: float) -> int:
    """Return a number of bytes rounded up to whole pages."""
    return -(-int(count) // PAGE) * PAGE
