"""What a rank has of the memory that ranks of one machine share to talk through, with the backend shm.

A page that several processes have touched counts for each of them in equal parts (PSS, as Linux has it), so that the
sum over all ranks is what there is. A group has slots on every rank, three for small tensors and three for large ones,
of which as much is touched as the largest message fills; transfers have two pieces. What a rank touches is worked out
from `comm/shm/collectives` and `transfer`, once every slot was in use: after a few steps. Within 10 % where one rank
does not wait for another for long; groups that find little memory left take less than is said here.
"""

from collections.abc import Iterator

from minidist.tools.estimate.layout import BYTES, Layout
from minidist.tools.estimate.traffic import Operation, Traffic
from minidist.tools.shm.sizes import (
    ALIGN,
    EAGER_BYTES,
    LARGE_BYTES,
    ONE_MEETING_BYTES,
    PIECE_BYTES,
    SLOTS,
    SMALL_BYTES,
    even,
)

PAGE = 4096
_PARTED = ("reduce_scatter", "all_to_all")  # a part for every other rank
_SYNCHRONISED = ("grads", "copies", "tensor", "activations")  # uses over which parameters are made equal at the start


class Touched:
    """Of the slots of one size of a group of so many ranks."""

    def __init__(self, size: int, slot: int):
        self.size, self.slot = size, slot
        self.counts = self.reach = self.part = 0

    def whole(self, reach: int, counts: float) -> None:
        """A message fills slots from the beginning. counts: bytes that count for this rank, of the slots of all."""
        self.reach, self.counts = max(self.reach, reach), max(self.counts, counts)

    def total(self, place: int) -> float:
        """Bytes that count for the rank at this place of the group.

        Of a message in parts every rank writes those of all others into its own slot, and reads one in each of theirs.
        What of a part lies where whole messages lie is counted already.
        """
        section = self.slot // self.size // ALIGN * ALIGN
        more = [self.part - min(self.part, max(0, self.reach - i * section)) for i in range(self.size)]
        written, read = sum(more) - more[place], (self.size - 1) * more[place]
        return SLOTS * (self.counts + (written + read) / 2)


def segment_bytes(traffic: Traffic, rank: int) -> int:
    """Bytes of a rank; 0 where it talks over another backend. `auto` is taken for the one of a CPU."""
    config = traffic.layout.config
    backend, device = config.comm.backend, config.device
    if backend != "shm" and (backend != "auto" or device.startswith("cuda")):
        return 0
    slots: dict[tuple[str, bool], Touched] = {}
    pieces: dict[str, int] = {}
    for use, name, elements, each in _messages(traffic, rank):
        group, numbers = traffic.group(use, rank), elements * each
        size = len(group)
        if name == "send":
            pieces[use] = max(pieces.get(use, 0), _pages(min(numbers, PIECE_BYTES)) if numbers > EAGER_BYTES else 0)
            continue
        mine = elements // size if name in ("all_gather", *_PARTED) else elements
        need = size * (mine * each + ALIGN) if name in _PARTED else mine * each
        small = need <= SMALL_BYTES
        at = slots.setdefault((use, small), Touched(size, SMALL_BYTES if small else LARGE_BYTES))
        if name in _PARTED:
            longest = at.slot // size // ALIGN * ALIGN // each
            at.part = max(at.part, _pages(min(mine, even(mine, longest)) * each))
            continue
        filled = _pages(min(mine, even(mine, at.slot // each)) * each)
        if name == "broadcast":  # by one rank, and every rank reads it
            at.whole(0, filled / size)
        elif name == "all_gather" or numbers * size <= ONE_MEETING_BYTES:  # by every rank
            at.whole(filled, filled)
        else:  # in slices, which one writes and another reads; of the first rank's slots all read all of the sum
            at.whole(filled, filled * (2 * size - 1 if group.index(rank) else size + 1) / (2 * size))
    touched = sum(each.total(traffic.group(use, rank).index(rank)) for (use, _), each in slots.items())
    return round(touched + sum(pieces.values()))


def _messages(traffic: Traffic, rank: int) -> Iterator[Operation]:
    """Those of a step, and of the start, when parameters are made equal."""
    for operation in traffic.operations(rank):
        if len(traffic.group(operation[0], rank)) > 1:
            yield operation
    for use in _SYNCHRONISED:
        if len(traffic.group(use, rank)) > 1:
            for numel in _parameters(traffic.layout):
                yield use, "broadcast", numel, BYTES["float32"]


def _parameters(layout: Layout) -> list[int]:
    """Elements of each parameter of the whole model, as it is before it is laid out."""
    model = layout.config.model
    hidden, heads = model.hidden_size, model.num_kv_heads * model.head_dim
    return [model.vocab_size * hidden, hidden * hidden, heads * hidden, model.intermediate_size * hidden, hidden]


def _pages(count: float) -> int:
    return -(-int(count) // PAGE) * PAGE
