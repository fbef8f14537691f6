"""Flatten parameters and cut them into equal shards: the solution, as it stands in minidist.zero.plan.

Assigning whole parameters to ranks gives unequal loads: an embedding may be larger than all other parameters
together. One flat parameter that is cut into equal shards gives every rank the same number of elements, and needs one
message for all of them. The boundaries of shards are independent of the boundaries of parameters, so one parameter
may be spread over several ranks, and a shard may contain parts of many parameters.

Reduce-scatter and all-gather need shards of equal length, so the flat parameter ends in padding. Padding counts in
the length of the flat parameter, and is sent and stored like the rest, but belongs to no parameter: code that treats
it as one computes a wrong norm.

Usual wrong answers:
* padding where the row divides as well
* laid out in the order of names
* the package's own layout
* all parameters in the same place
* elements counted from the begin of the row
* elements counted from the begin of the shard
* every parameter padded by itself, and the row longer than need be
* laid out by size, not in the given order
* the last shard ends where the last parameter does, and is shorter than the others
* a parameter that the shard has nothing of is there, with a negative length
* the last shard forgets its first parameter
* each shard has the first element of the next as well
* the padding as if it were in one shard of a row that has none
* shards rounded down, and the last parameter has no room
* a parameter that spans a whole shard is missing from it
* a parameter that is cut belongs to the shard in which it begins
* a layout without parameters
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
