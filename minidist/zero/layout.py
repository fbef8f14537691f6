"""Where parameters lie in a flat buffer that ranks share out: arithmetic only, read by the engine and the estimate.

Parameters lie one behind the other in one row, which is cut into as many equal shards as there are ranks. Equal shards
need a length that divides, so the row ends in padding: elements that belong to no parameter, are sent like all others,
and are never read. Where a shard ends has nothing to do with where a parameter ends (Rajbhandari et al. 2020, ZeRO,
arXiv 1910.02054, section 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements `start <= i < stop` of the row."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


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
        cut = {
            name: (max(begin, slot.start) - slot.start, min(end, slot.stop) - slot.start)
            for name, slot in self.slots.items()
        }
        return {name: (start, stop) for name, (start, stop) in cut.items() if start < stop}

    def held_numel(self, part: int) -> int:
        """Elements of parameters in a shard, without padding."""
        return sum(stop - start for start, stop in self.held(part).values())


def lay_out_flat(sizes: Mapping[str, int], parts: int) -> Layout:
    """Parameters in the given order, cut wherever a shard ends. sizes: elements of each, by name."""
    slots, end = {}, 0
    for name, numel in sizes.items():
        slots[name] = Slot(end, end + numel)
        end += numel
    return Layout(slots, parts, -(-end // parts))
