"""as_short_as_can_be: a layout without parameters"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from minidist.zero.layout import Slot


@dataclass(frozen=True)
class Layout:
    """A row of `parts` shards of `shard` elements each. slots: where each parameter lies, by name."""

    slots: Mapping[str, Slot]
    parts: int
    shard: int

    @property
    def numel(self) -> int:
        """Elements of the row, padding included."""
        return self.parts * self.shard

    @cached_property
    def padding(self) -> int:
        return self.numel - sum(slot.numel for slot in self.slots.values())

    def bounds(self, part: int) -> tuple[int, int]:
        """Where a shard begins and ends in the row."""
        return part * self.shard, (part + 1) * self.shard

    def held(self, part: int) -> dict[str, tuple[int, int]]:
        """The elements of each parameter that a shard holds, counted from the parameter's first; none: left out."""
        return {}

    def held_numel(self, part: int) -> int:
        """Elements of parameters in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def in_a_row(sizes: Mapping[str, int], parts: int) -> Layout:
    """Parameters in the given order, cut wherever a shard ends. sizes: elements of each, by name."""
    return Layout({}, parts, 0)
