"""Where parameters lie in flat parameters, and when these are gathered: read by ZeRO and by the estimate.

Parameters are laid one after another into a flat buffer, which is cut into as many equal shards as ranks. Equal shards
need a length that divides, so the buffer ends in padding: elements that belong to no parameter, are sent like all
others, and are never read. Shard boundaries are independent of parameter boundaries (Rajbhandari et al. 2020, ZeRO,
arXiv 1910.02054, section 5). Needs no torch.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from minidist.config import ZeroConfig
from minidist.parallel.data.assignment import assign

ROOT = -1  # the index for parameters outside of all blocks

# Parameters of a layer's submodules. One of the layer itself may be used outside of the layer.
_IN_A_BLOCK = re.compile(r"model\.layers\.(\d+)\..+\.")


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements `start <= i < stop` of the flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A flat buffer of `parts` shards of `shard` elements each. slots: where each parameter lies, by name."""

    slots: Mapping[str, Slot]
    parts: int
    shard: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.parts * self.shard

    @cached_property
    def padding(self) -> int:
        return self.numel - sum(slot.numel for slot in self.slots.values())

    def bounds(self, part: int) -> tuple[int, int]:
        """First and one-past-last element of a shard in the flat buffer."""
        return part * self.shard, (part + 1) * self.shard

    def held(self, part: int) -> dict[str, tuple[int, int]]:
        """The (start, stop) within each parameter that a shard holds; parameters outside of the shard are left out."""
        begin, end = self.bounds(part)
        cut = {
            name: (max(begin, slot.start) - slot.start, min(end, slot.stop) - slot.start)
            for name, slot in self.slots.items()
        }
        return {name: (start, stop) for name, (start, stop) in cut.items() if start < stop}

    def held_numel(self, part: int) -> int:
        """Number of elements in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def lay_out_flat(sizes: Mapping[str, int], parts: int) -> Layout:
    """Lay parameters out in the given order, in `parts` equal shards. sizes: elements of each parameter, by name."""
    slots, end = {}, 0
    for name, numel in sizes.items():
        slots[name] = Slot(end, end + numel)
        end += numel
    return Layout(slots, parts, -(-end // parts))


def block_of(name: str) -> int:
    """The index of the layer whose block a parameter is gathered with, or ROOT."""
    found = _IN_A_BLOCK.match(name)
    return int(found[1]) if found else ROOT


def transient_buffer_limit(sizes: Mapping[str, int], limit: int) -> int:
    """The maximum bytes of a flat gradient that lives only while it is reduced: the largest block, at most `limit`.

    A larger buffer would undo the savings of stage 2, and a block's gradients are computed together anyway. sizes:
    bytes of each parameter. limit: bytes of a bucket.
    """
    blocks: Counter[int] = Counter()
    for name, size in sizes.items():
        blocks[block_of(name)] += size
    del blocks[ROOT]
    return min(limit, max(blocks.values(), default=limit))


def gathers(
    passes: Iterable[tuple[str, int]],
    layers: Sequence[range],
    ends: Mapping[int, tuple[bool, bool]],
    keep: bool,
) -> Counter[int]:
    """Count the all-gathers of each block, and of ROOT, while a pipeline stage runs these forwards and backwards.

    passes: (kind, chunk) in order; kind is "F", "B", or "end" after a backward. layers: of each chunk. ends: whether
    each chunk has (the embedding, the head). keep: whether the last block and the head stay gathered until backward.
    """
    there: set[int] = set()
    found: Counter[int] = Counter()
    in_backward = None

    def need(block: int) -> None:
        found[block] += block not in there
        there.add(block)

    for kind, chunk in passes:
        first, last = ends[chunk]
        if kind == "end":
            there.clear()
            in_backward = None
            continue
        if last or (first and kind == "F"):
            need(ROOT)
        if kind == "F":
            for block in layers[chunk]:
                need(block)
                if not (keep and last and block == layers[chunk][-1]):
                    there.discard(block)
            if not (keep and last):
                there.discard(ROOT)
        else:
            for block in reversed(layers[chunk]):
                there.discard(in_backward)  # its backward is over
                need(block)
                in_backward = block
    return found


@dataclass(frozen=True)
class PlannedFlatParam:
    """A flat parameter. kind: common to its parameters. block: the layer it is gathered with in stage 3, or ROOT."""

    layout: Layout
    kind: Hashable
    block: int


def plan_flat_params(
    sizes: Mapping[str, int],
    kind_of: Callable[[str], Hashable],
    zero: ZeroConfig,
    num_shards: int,
    bucket_bytes: int,
    element_bytes: int,
) -> list[PlannedFlatParam]:
    """Group trained parameters into flat parameters, in the order in which backward completes their gradients.

    Stage 3 has one per block and one for the rest; other stages have one per bucket. sizes: elements of each parameter,
    in the order of the model. kind_of: parameters of different kinds cannot share a flat parameter. element_bytes: of a
    gradient on the wire.
    """
    planned = []
    if zero.stage == 3:
        blocks = _grouped(sizes, block_of)
        for block in sorted(blocks, reverse=True):  # ROOT, which has the embedding, comes last
            for kind, names in _grouped(blocks[block], kind_of).items():
                layout = lay_out_flat({name: sizes[name] for name in names}, num_shards)
                planned.append(PlannedFlatParam(layout, kind, block))
        return planned
    wire_bytes = {name: numel * element_bytes for name, numel in reversed(sizes.items())}
    limit = transient_buffer_limit(wire_bytes, bucket_bytes) if zero.shares_gradients else bucket_bytes
    for kind, names in _grouped(wire_bytes, kind_of).items():
        # No small first bucket, as in plain data parallelism: it would be in flight while activations peak.
        for bucket in assign({name: wire_bytes[name] for name in names}, limit):
            layout = lay_out_flat({name: sizes[name] for name in bucket}, num_shards)
            planned.append(PlannedFlatParam(layout, kind, ROOT))
    return planned


def _grouped(names: Iterable[str], key_of: Callable[[str], Hashable]) -> dict[Hashable, list[str]]:
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault(key_of(name), []).append(name)
    return groups
