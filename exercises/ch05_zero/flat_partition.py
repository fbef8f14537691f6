"""Flatten parameters and cut them into equal shards.

Write the missing lines of Layout and lay_out_flat; its docstring specifies the result.
You may call: Slot, Layout, Layout.bounds, max, min, sum, dict.items, dict.values.
Check it with: python -m exercises check flat_partition

Stub fc1ab40f.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from minidist.zero.plan import Slot


@dataclass(frozen=True)
class Layout:
    """A flat buffer of `parts` shards of `shard` elements each. slots: where each parameter lies, by name."""

    slots: Mapping[str, Slot]
    parts: int
    shard: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        raise NotImplementedError("return the length of the flat parameter")

    @cached_property
    def padding(self) -> int:
        raise NotImplementedError("return the number of elements of padding")

    def bounds(self, part: int) -> tuple[int, int]:
        """First and one-past-last element of a shard in the flat buffer."""
        raise NotImplementedError("return the begin and end of this shard in the flat parameter")

    def held(self, part: int) -> dict[str, tuple[int, int]]:
        """The (start, stop) within each parameter that a shard holds; parameters outside of the shard are left out."""
        raise NotImplementedError("return which elements of each parameter are in this shard")

    def held_numel(self, part: int) -> int:
        """Number of elements in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def lay_out_flat(sizes: Mapping[str, int], parts: int) -> Layout:
    """Lay parameters out in the given order, in `parts` equal shards. sizes: elements of each parameter, by name."""
    raise NotImplementedError("return the layout: consecutive slots, shards as short as possible")
