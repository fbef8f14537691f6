"""Flatten parameters and cut them into equal shards.

Write the missing lines of Layout and lay_out_flat; its docstring specifies the result.
You may call: Slot, Layout, Layout.bounds, max, min, sum, dict.items, dict.values.
Check it with: python -m exercises check flat_partition

Stub b8c89a0d.
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
        """Elements of the row, padding included."""
        raise NotImplementedError("return the length of the flat parameter")

    @cached_property
    def padding(self) -> int:
        raise NotImplementedError("return the number of elements of padding")

    def bounds(self, part: int) -> tuple[int, int]:
        """Where a shard begins and ends in the row."""
        raise NotImplementedError("return the begin and end of this shard in the flat parameter")

    def held(self, part: int) -> dict[str, tuple[int, int]]:
        """The elements of each parameter that a shard holds, counted from the parameter's first; none: left out."""
        raise NotImplementedError("return which elements of each parameter are in this shard")

    def held_numel(self, part: int) -> int:
        """Elements of parameters in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def lay_out_flat(sizes: Mapping[str, int], parts: int) -> Layout:
    """Parameters in the given order, cut wherever a shard ends. sizes: elements of each, by name."""
    raise NotImplementedError("return the layout: consecutive slots, shards as short as possible")
