"""Finds what a shard has by walking along the row."""

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
        begin, end = self.bounds(part)
        found: dict[str, tuple[int, int]] = {}
        for name, slot in self.slots.items():
            inside = [i - slot.start for i in range(slot.start, slot.stop) if begin <= i < end]
            if inside:
                found[name] = (inside[0], inside[-1] + 1)
        return found

    def held_numel(self, part: int) -> int:
        """Elements of parameters in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def in_a_row(sizes: Mapping[str, int], parts: int) -> Layout:
    """Parameters in the given order, cut wherever a shard ends. sizes: elements of each, by name."""
    ends = [sum(list(sizes.values())[: i + 1]) for i in range(len(sizes))]
    slots = {name: Slot(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)}
    total = sum(sizes.values())
    shard, rest = divmod(total, parts)
    return Layout(slots, parts, shard + bool(rest))
