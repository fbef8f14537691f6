"""Tests of flat_shards: the buffer as a list of elements, which is cut by hand."""

import itertools
import random

import torch
from torch import nn

from exercises.conditions import FLOATS, Declaration, Tensors, check_conditions
from exercises.expected_shards import shard_elements, shard_values
from exercises.observations import LiveTensorMemory
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_gather, reduce_scatter

# Shapes by name: parameters in one shard, in several and in all, scalars, one without elements; names in no order.
CASES = (
    {"a": (6,)},
    {"a": (5,), "b": (2, 2), "c": ()},
    {"z": (3,), "b": (2,), "a": (4,)},
    {"a": ()},
    {"a": (2,), "nothing": (0, 3), "b": (3,)},
    {"norm": (2,), "embed": (5, 4), "bias": (), "head": (3, 1)},
)
KIB = 1024


def cases():
    """Those above, and random ones."""
    yield from CASES
    draw = random.Random(5)
    for _ in range(30):
        names = draw.sample("abcdefgh", draw.randint(1, 6))
        yield {name: tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 3))) for name in names}


def value(shapes, name, rank, dtype=torch.float64):
    """The values of a parameter on a rank: everywhere others."""
    numel = torch.Size(shapes[name]).numel()
    first = 100 * rank + 10 * list(shapes).index(name) + 1
    return (torch.arange(numel, dtype=dtype) + first).reshape(shapes[name])


def flat_of(answer, group, shapes, dtype=torch.float64):
    """A flat parameter, and its parameters by name."""
    parameters = {name: nn.Parameter(value(shapes, name, group.rank, dtype)) for name in shapes}
    given = dict(parameters)
    flat = answer.FlatParameter(given, group)
    expect("the names in the given dictionary, which is the caller's", list(given), list(shapes))
    return flat, parameters


def shards_of(shapes, size):
    return shard_elements({name: torch.Size(shape).numel() for name, shape in shapes.items()}, size)


def told(shapes, size):
    return f"parameters {shapes}, {size} rank{'s' * (size > 1)}".replace("torch.Size", "")


@test(points=4, ranks=(1, 2, 3, 4))
def pads_once_and_cuts_equally(answer, world, network):
    """The parameters in their order, then zeros up to the next multiple of the world size; rank r has shard r."""
    for shapes in cases():
        flat, _ = flat_of(answer, network.group, shapes)
        shards, case = shards_of(shapes, world.size), told(shapes, world.size)
        numbers = [shard_values(shard, lambda name, shapes=shapes: value(shapes, name, world.rank)) for shard in shards]
        expect("the buffer", flat.full.tolist(), sum(numbers, []), case=case)
        expect("the shard", flat.shard.tolist(), numbers[world.rank], case=case)


@test(points=2, ranks=(1, 3))
def parameters_become_views(answer, world, network):
    """Parameters keep their objects, values, shapes and dtypes, and see what is written to the buffer or the shard."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shapes in CASES:
            flat, parameters = flat_of(answer, network.group, shapes, dtype)
            case = told(shapes, world.size)
            expect("the dtype of the buffer", str(flat.full.dtype), str(dtype), case=case)
            expect("whether the buffer requires gradients", flat.full.requires_grad, False, case=case)
            flat.full.mul_(2)
            flat.shard.mul_(-1)
            mine = {element for element in shards_of(shapes, world.size)[world.rank] if element}
            for name, parameter in parameters.items():
                before = 2 * value(shapes, name, world.rank, dtype)
                for index in range(before.numel()):
                    if (name, index) in mine:
                        before.view(-1)[index] *= -1
                what = f"the parameter {name} after the buffer is doubled, and then this rank's shard negated"
                expect(what, parameter.detach(), before, case=case)
                expect(f"whether {name} requires gradients", parameter.requires_grad, True, case=case)
                expect(f"whether {name} is a leaf of autograd's graph", parameter.is_leaf, True, case=case)


@test(points=3, ranks=(1, 2, 3, 4))
def slices_are_places_in_the_shard(answer, world, network):
    """`slices` and `specs` name the elements of each parameter that the shard has; a name without any is left out."""
    groups = [network.group, *([network.divided_group] if world.size == 4 else [])]
    for group, shapes in itertools.product(groups, cases()):
        flat, _ = flat_of(answer, group, shapes)
        case, wanted = told(shapes, group.size), {}
        for place, element in enumerate(shards_of(shapes, group.size)[group.rank]):
            if element:
                wanted.setdefault(element[0], []).append((place, element[1]))
        found = {name: list(range(len(flat.shard)))[place] for name, place in flat.slices.items()}
        expect("the places in the shard, by name", found, {n: [p for p, _ in e] for n, e in wanted.items()}, case=case)
        expect("the names that have a spec", sorted(flat.specs), sorted(wanted), case=case)
        for name, spec in flat.specs.items():
            numbers = torch.arange(torch.Size(shapes[name]).numel()).reshape(shapes[name])
            elements = sum((numbers[box.slices].flatten().tolist() for box in spec.boxes), [])
            expect(f"the elements in the boxes of {name}", elements, [i for _, i in wanted[name]], case=case)
            facts = [spec.name, list(spec.shape), list(spec.contributors)]
            expect("name, shape and contributors of a spec", facts, [name, list(shapes[name]), [world.rank]], case=case)


@test(points=3, ranks=(1, 3))
def flattens_other_tensors(answer, world, network):
    """`flatten` takes the parameters' tensors out of the dictionary into a new buffer; missing ones are zeros."""
    shapes = {"a": (5,), "b": (2, 3), "c": (), "d": (2,)}
    flat, parameters = flat_of(answer, network.group, shapes)
    shards = shards_of(shapes, world.size)
    for missing in ("", "a", "bd", "abcd"):
        junk = torch.full((64,), float("nan"), dtype=torch.float64)  # what new memory may contain
        del junk
        tensors = {n: value(shapes, n, world.rank) for n in reversed(shapes) if n not in missing}
        if "b" in tensors:  # a transposed matrix
            tensors["b"] = tensors["b"].t().contiguous().t()
        kept = dict(tensors)
        tensors["other"] = torch.ones(2)
        got = flat.flatten(tensors)
        case = f"{told(shapes, world.size)}, none for {', '.join(missing) or 'no name'}"
        numbers = [
            shard_values(shard, lambda n, missing=missing: value(shapes, n, world.rank) * (n not in missing))
            for shard in shards
        ]
        expect("the flat tensor", got.tolist(), sum(numbers, []), case=case)
        expect("the names left in the dictionary", sorted(tensors), ["other"], case=case)
        expect("whether the result requires gradients", got.requires_grad, False, case=case)
        got.zero_()
        for name, tensor in kept.items():
            expect(f"the tensor of {name} after the result is zeroed", tensor, value(shapes, name, world.rank))
        for name, parameter in parameters.items():
            expect(f"the parameter {name}", parameter.detach(), value(shapes, name, world.rank), case=case)
    first = flat.flatten({"a": torch.ones(5, dtype=torch.float64)})
    kept = first.clone()
    flat.flatten({})
    expect("the result of an earlier call", first, kept)


@test(points=1, ranks=(2, 3))
def survives_the_collectives(answer, world, network):
    """A reduce-scatter of flattened gradients and an all-gather of shards put every element in its place."""
    shapes = {"norm": (2,), "embed": (5, 4), "bias": (), "head": (2, 2)}
    flat, parameters = flat_of(answer, network.group, shapes)
    reduced = torch.empty_like(flat.shard)
    reduce_scatter(reduced, flat.flatten({n: value(shapes, n, world.rank) for n in shapes}), network.group)
    for name, place in flat.slices.items():
        flat.shard[place] = reduced[place]
    all_gather(flat.full, flat.shard, network.group)
    for name, parameter in parameters.items():
        total = sum(value(shapes, name, rank) for rank in range(world.size))
        expect(f"the sum of {name} on every rank", parameter.detach(), total)


@test(points=1, ranks=(2,))
def one_buffer_in_memory(answer, world, network):
    """The parameters' own memory is freed, and the shard has none of its own."""
    with LiveTensorMemory() as memory:
        flat, parameters = flat_of(answer, network.group, {"a": (64, KIB), "b": (3,)}, torch.float32)
        expect("KiB of parameters, buffer and shard", memory.nbytes() // KIB, 256, case="256 KiB of parameters")
        expect("the number of parameters", len(parameters), 2)
        expect("the length of the buffer", len(flat.full), 64 * KIB + 4)


def buffer_and_shard(answer, group, values):
    parameters = {"a": nn.Parameter(values), "b": nn.Parameter(torch.full((2,), 3, dtype=values.dtype))}
    flat = answer.FlatParameter(parameters, group)
    return flat.full, flat.shard


def cut_by_hand(ranks, rank):
    values, size = ranks[rank]["values"].detach(), len(ranks)
    full = torch.cat([values.flatten(), torch.full((2,), 3, dtype=values.dtype)])
    full = torch.cat([full, full.new_zeros(-len(full) % size)])
    return full, full.view(size, -1)[rank]


DECLARATION = Declaration(
    inputs={"values": Tensors(dtypes=FLOATS, layouts=("slice", "transposed", "scalar"))},
    call=buffer_and_shard,
    reference=cut_by_hand,
    shares=True,
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size and memory layout, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
