"""Pads by what is missing, and clamps the ends of a parameter to the shard."""

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
        return self.shard * self.parts - max((slot.stop for slot in self.slots.values()), default=0)

    def bounds(self, part: int) -> tuple[int, int]:
        """Where a shard begins and ends in the row."""
        begin = self.shard * part
        return begin, begin + self.shard

    def held(self, part: int) -> dict[str, tuple[int, int]]:
        """The elements of each parameter that a shard holds, counted from the parameter's first; none: left out."""
        begin, end = self.bounds(part)
        found = {}
        for name, slot in self.slots.items():
            if slot.stop <= begin or slot.start >= end or not slot.numel:
                continue
            first = 0 if slot.start >= begin else begin - slot.start
            last = slot.numel if slot.stop <= end else end - slot.start
            found[name] = (first, last)
        return found

    def held_numel(self, part: int) -> int:
        """Elements of parameters in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def in_a_row(sizes: Mapping[str, int], parts: int) -> Layout:
    """Parameters in the given order, cut wherever a shard ends. sizes: elements of each, by name."""
    slots, end = {}, 0
    for name in sizes:
        begin, end = end, end + sizes[name]
        slots[name] = Slot(begin, end)
    while end % parts:
        end += 1
    return Layout(slots, parts, end // parts)
