"""Flatten parameters and cut them into equal shards.

Write the missing lines of FlatLayout and lay_out_flat; their docstrings specify the results.
You may call: Slot, FlatLayout, FlatLayout.shard_bounds, max, min, sum, dict.items, dict.values.
Check it with: python -m exercises check flat_partition

Stub 3882e4e7.
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
        raise NotImplementedError("return the length of the flat parameter")

    @cached_property
    def padding(self) -> int:
        """Number of elements at the end of the flat buffer that belong to no parameter."""
        raise NotImplementedError("return the number of elements of padding")

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Return the (start, stop) of a shard in the flat buffer. shard: its index."""
        raise NotImplementedError("return the begin and end of this shard in the flat parameter")

    def param_ranges(self, shard: int) -> dict[str, tuple[int, int]]:
        """Return which elements of each parameter lie in a shard, as {name: (start, stop)} within the parameter.

        shard: its index. Parameters without elements in the shard are left out.
        """
        raise NotImplementedError("return which elements of each parameter are in this shard")

    def unpadded_numel(self, shard: int) -> int:
        """Return the number of elements of parameters in a shard, without padding. shard: its index."""
        return sum(stop - start for start, stop in self.param_ranges(shard).values())


def lay_out_flat(sizes: Mapping[str, int], num_shards: int) -> FlatLayout:
    """Lay parameters one after another into a flat buffer of `num_shards` equal shards; return the layout.

    sizes: number of elements of each parameter, by name, in the order of the flat buffer.
    """
    raise NotImplementedError("return the layout: consecutive slots, shards as short as possible")
