"""The layout of flat parameters; ZeRO and the estimate use it.

Parameters are laid one after another into a flat buffer, which is cut into as many equal shards as there are ranks. The
number of shards must divide the length, so the buffer ends in padding: elements that belong to no parameter, are sent
like all others, and are never read. Shard boundaries are independent of parameter boundaries (Rajbhandari et al. 2020,
ZeRO, arXiv 1910.02054, section 5). Needs no torch.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from minidist.config import ZeroConfig
from minidist.parallel.data.assignment import assign_buckets

ROOT = -1  # the index for parameters outside of all blocks

# Parameters of a layer's submodules. One of the layer itself may be used outside of the layer.
_IN_A_BLOCK = re.compile(r"model\.layers\.(\d+)\..+\.")


@dataclass(frozen=True)
class Slot:
    """The elements of a flat buffer that one parameter occupies: `start <= i < stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Where parameters lie in a flat buffer, which is cut into `num_shards` shards of `shard_numel` elements each.

    slots: the elements of the flat buffer that each parameter occupies, by name.
    """

    slots: Mapping[str, Slot]
    num_shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Number of elements of the flat buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def padding(self) -> int:
        """Number of elements at the end of the flat buffer that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots.values())

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Return the (start, stop) of a shard in the flat buffer. shard: its index."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def param_ranges(self, shard: int) -> dict[str, tuple[int, int]]:
        """Return which elements of each parameter lie in a shard, as {name: (start, stop)} within the parameter.

        shard: its index. Parameters without elements in the shard are left out.
        """
        begin, end = self.shard_bounds(shard)
        ranges = {
            name: (max(begin, slot.start) - slot.start, min(end, slot.stop) - slot.start)
            for name, slot in self.slots.items()
        }
        return {name: (start, stop) for name, (start, stop) in ranges.items() if start < stop}

    def unpadded_numel(self, shard: int) -> int:
        """Return the number of elements of parameters in a shard, without padding. shard: its index."""
        return sum(stop - start for start, stop in self.param_ranges(shard).values())


def lay_out_flat(sizes: Mapping[str, int], num_shards: int) -> FlatLayout:
    """Lay parameters one after another into a flat buffer of `num_shards` equal shards; return the layout.

    sizes: number of elements of each parameter, by name, in the order of the flat buffer.
    """
    slots = {}
    end = 0
    for name, numel in sizes.items():
        slots[name] = Slot(end, end + numel)
        end += numel
    return FlatLayout(slots, num_shards, -(-end // num_shards))


def block_index(name: str) -> int:
    """Return the index of the layer with which stage 3 gathers a parameter; ROOT for one outside of all layers.

    name: the parameter's name in the full model.
    """
    match = _IN_A_BLOCK.match(name)
    return int(match[1]) if match else ROOT


def transient_buffer_limit(sizes: Mapping[str, int], limit: int) -> int:
    """Return the maximum bytes of a flat gradient that exists only during its reduction (stage 2).

    The limit is the size of the largest block's gradients, which are computed together, or `limit` if that is smaller.
    A larger buffer would undo the savings of stage 2. sizes: bytes of each parameter's gradient, by name. limit:
    maximum bytes of a bucket.
    """
    blocks: Counter[int] = Counter()
    for name, size in sizes.items():
        blocks[block_index(name)] += size
    del blocks[ROOT]
    return min(limit, max(blocks.values(), default=limit))


@dataclass(frozen=True)
class PlannedFlatParam:
    """A flat parameter to be built: the parameters that it consists of, by name, in its `layout`.

    kind: the value of `kind_of` for all its parameters (`plan_flat_params`). block: in stage 3 the index of the layer
    with which the flat parameter is gathered; ROOT for parameters outside of all layers, and in other stages.
    """

    layout: FlatLayout
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

    Stage 3 makes one per block and one for all other parameters; other stages make one per bucket.

    sizes: number of elements of each parameter, by name, in the order of the model. kind_of: maps a parameter's name to
    its kind, any hashable value (such as its replicas); a flat parameter has parameters of one kind only. zero: the
    ZeRO options: the stage, and how it treats gradients. num_shards: into how many shards each flat parameter is cut.
    bucket_bytes: maximum bytes of a bucket. element_bytes: bytes of one gradient element in the reduction.
    """
    planned = []
    if zero.stage == 3:
        blocks = _group_by(sizes, block_index)
        for block in sorted(blocks, reverse=True):  # ROOT, which has the embedding, comes last
            for kind, names in _group_by(blocks[block], kind_of).items():
                layout = lay_out_flat({name: sizes[name] for name in names}, num_shards)
                planned.append(PlannedFlatParam(layout, kind, block))
        return planned
    wire_bytes = {name: numel * element_bytes for name, numel in reversed(sizes.items())}
    limit = transient_buffer_limit(wire_bytes, bucket_bytes) if zero.shards_gradients else bucket_bytes
    for kind, names in _group_by(wire_bytes, kind_of).items():
        # No small first bucket, as in plain data parallelism: it would be in flight while activations peak.
        for bucket in assign_buckets({name: wire_bytes[name] for name in names}, limit):
            layout = lay_out_flat({name: sizes[name] for name in bucket}, num_shards)
            planned.append(PlannedFlatParam(layout, kind, ROOT))
    return planned


def _group_by(names: Iterable[str], key_of: Callable[[str], Hashable]) -> dict[Hashable, list[str]]:
    """Return lists of names with the same key, by key, in the order of first occurrence."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault(key_of(name), []).append(name)
    return groups
