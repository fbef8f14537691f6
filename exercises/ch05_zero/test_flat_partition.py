"""Tests of flat_partition: the row is laid out as a list of elements and cut; then it travels."""

import random

import torch

from exercises.expected_shards import shard_elements
from exercises.testing import expect, test
from minidist.comm import all_gather, reduce_scatter

# Elements by name. Parameters that lie in one shard, in several and in all, or have no element; names in no order.
CASES = (
    ({"a": 6}, 3),
    ({"a": 5, "b": 4, "c": 1}, 3),
    ({"norm": 2, "embed": 20, "a": 1, "head": 3}, 4),
    ({"z": 3, "b": 2, "a": 4}, 1),
    ({"a": 1}, 3),
    ({"a": 2, "nothing": 0, "b": 3}, 2),
    ({"b": 7, "a": 9}, 8),
)
SIZES = {"norm": 2, "embed": 20, "bias": 1, "head": 4}


def cases():
    """Those above, and random ones."""
    yield from CASES
    draw = random.Random(5)
    for _ in range(60):
        names = draw.sample("abcdefgh", draw.randint(1, 6))
        yield {name: draw.randint(0, 12) for name in names}, draw.randint(1, 8)


def told(sizes, parts):
    return f"lay_out_flat({sizes}, {parts})"


@test(points=4)
def padding_is_minimal(answer):
    """Parameters concatenated in the given order, then as little padding as equal shards allow."""
    for sizes, parts in cases():
        layout, shards, case = (
            answer.lay_out_flat(sizes, parts),
            shard_elements(sizes, parts),
            told(sizes, parts),
        )
        expect("elements of a shard", layout.shard_numel, len(shards[0]), case=case)
        expect("elements of the row", layout.numel, sum(map(len, shards)), case=case)
        expect("elements that belong to no parameter", layout.padding, sum(shards, []).count(None), case=case)
        begin = 0
        expect("the parameters that have a place", sorted(layout.slots), sorted(sizes), case=case)
        for name, numel in sizes.items():
            slot = layout.slots[name]
            expect(f"the place of {name!r}", [slot.start, slot.stop], [begin, begin + numel], case=case)
            begin += numel


@test(points=2)
def shards_are_adjacent(answer):
    """Shard 0 begins at 0, each of the others where the one before it ends, the last ends with the row."""
    for sizes, parts in cases():
        layout, shard = answer.lay_out_flat(sizes, parts), len(shard_elements(sizes, parts)[0])
        got = [list(layout.shard_bounds(part)) for part in range(parts)]
        wanted = [[part * shard, (part + 1) * shard] for part in range(parts)]
        expect("[begin, end] of each shard", got, wanted, case=told(sizes, parts))


@test(points=4)
def each_element_is_in_one_shard(answer):
    """What a shard has of a parameter, counted from the parameter's first element; nothing of it: left out."""
    for sizes, parts in cases():
        layout = answer.lay_out_flat(sizes, parts)
        for part, shard in enumerate(shard_elements(sizes, parts)):
            wanted = {}
            for name, index in filter(None, shard):
                wanted[name] = [min(index, wanted.get(name, [index])[0]), index + 1]
            got = {name: list(ends) for name, ends in layout.param_ranges(part).items()}
            expect(f"what shard {part} has", got, wanted, case=told(sizes, parts))
            held = sum(element is not None for element in shard)
            expect(
                f"elements of parameters in shard {part}", layout.unpadded_numel(part), held, case=told(sizes, parts)
            )


@test(points=4, ranks=(1, 2, 3, 4))
def survives_the_collectives(answer, world, network):
    """Gradients are summed into shards and parameters gathered from them, in one message each; none is misplaced."""
    layout = answer.lay_out_flat(SIZES, world.size)
    begin, end = layout.shard_bounds(world.rank)
    row, shard = torch.zeros(layout.numel), torch.zeros(end - begin)
    for name, slot in layout.slots.items():
        row[slot.start : slot.stop] = gradient(name, world.rank)
    reduce_scatter(shard, row, network.group)
    for name, (start, stop) in layout.param_ranges(world.rank).items():
        total = sum(gradient(name, rank) for rank in range(world.size))
        at = layout.slots[name].start - begin
        expect(f"the sum of {name}'s elements {start} to {stop}", shard[at + start : at + stop], total[start:stop])
    all_gather(row, shard, network.group)
    for name, slot in layout.slots.items():
        total = sum(gradient(name, rank) for rank in range(world.size))
        expect(f"{name} on every rank", row[slot.start : slot.stop], total)
    elements = sum(SIZES.values())
    padded = -(-elements // world.size) * world.size
    sent = sorted((record.name, record.payload_bytes // 4) for record in network.records)
    wanted = [["all_gather", padded], ["reduce_scatter", padded]] if world.size > 1 else []
    expect("what is sent: (operation, elements)", [list(pair) for pair in sent], wanted, case=told(SIZES, world.size))


def gradient(name, rank):
    """What one rank adds: whole numbers that differ by rank, parameter and element."""
    return torch.arange(float(SIZES[name])) + 100 * rank + 1000 * len(name)
