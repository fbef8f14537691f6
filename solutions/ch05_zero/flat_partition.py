"""Flatten parameters and cut them into equal shards: the solution, as it stands in minidist.zero.plan.

Assigning whole parameters to ranks gives unequal loads: an embedding may be larger than all other parameters
together. One flat parameter that is cut into equal shards gives every rank the same number of elements, and needs one
message for all of them. The boundaries of shards are independent of the boundaries of parameters, so one parameter
may be spread over several ranks, and a shard may contain parts of many parameters.

Reduce-scatter and all-gather need shards of equal length, so the flat parameter ends in padding. Padding counts in
the length of the flat parameter, and is sent and stored like the rest, but belongs to no parameter: code that treats
it as one computes a wrong norm.

Usual wrong answers:
* adds padding although the length is divisible
* lays parameters out in the order of their names
* the package's own layout
* all parameters at the same place
* counts elements from the start of the flat parameter
* counts elements from the start of the shard
* pads every parameter separately, so the flat parameter is longer than necessary
* lays parameters out by size, not in the given order
* the last shard ends with the last parameter, and is shorter than the others
* includes parameters without elements in the shard, with a negative length
* the last shard omits its first parameter
* each shard also has the first element of the next one
* counts padding although the length is divisible
* rounds the shard length down, so the last parameter does not fit
* omits a parameter that spans a full shard
* assigns a parameter that is cut to the shard in which it begins
* a layout without parameters
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from minidist.zero.plan import Slot


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
    slots, end = {}, 0
    for name, numel in sizes.items():
        slots[name] = Slot(end, end + numel)
        end += numel
    return FlatLayout(slots, num_shards, -(-end // num_shards))
