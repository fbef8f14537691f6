"""Tests of flat_parameter: the buffer as a list of elements, which is cut by hand."""

import itertools
import math
import random
from unittest import mock

import torch
from torch import nn

from exercises.conditions import FLOATS, Declaration, Tensors, check_conditions
from exercises.expected_shards import shard_elements, shard_values
from exercises.observations import LiveTensorMemory, timeline
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import Handle

# Shapes by name: parameters in one shard, in several and in all, scalars, one without elements; names in no order.
CASES = (
    {"a": (6,)},
    {"a": (5,), "b": (2, 2), "c": ()},
    {"z": (3,), "b": (2,), "a": (4,)},
    {"a": ()},
    {"a": (2,), "nothing": (0, 3), "b": (3,)},
    {"norm": (2,), "embed": (5, 4), "bias": (), "head": (3, 1)},
    {"nothing": (0,), "none": (2, 0)},
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


def flat_of(answer, group, shapes, dtype=torch.float64, own_shard=False):
    """A flat parameter whose masters are the parameters themselves, and its parameters by name."""
    parameters = {name: nn.Parameter(value(shapes, name, group.rank, dtype)) for name in shapes}
    given, masters = dict(parameters), {"other": nn.Parameter(torch.ones(2)), **parameters}
    flat = answer.FlatParameter(given, masters, group, own_shard)
    expect("the names in the given dictionary, which is the caller's", list(given), list(shapes))
    expect("the names of the given masters", list(masters), ["other", *shapes])
    given.clear()
    expect("the names in the attribute `parameters`", list(flat.parameters), list(shapes))
    are_given = [flat.parameters[name] is parameters[name] for name in shapes]
    expect("whether each of `parameters` is the given Parameter", are_given, [True] * len(shapes))
    expect("whether the attribute `group` is the given group", flat.group is group, True)
    return flat, parameters


def shards_of(shapes, size):
    return shard_elements({name: torch.Size(shape).numel() for name, shape in shapes.items()}, size)


def told(shapes, size):
    return f"parameters {shapes}, {size} rank{'s' * (size > 1)}".replace("torch.Size", "")


@test(points=3, ranks=(1, 2, 3, 4))
def pads_once_and_cuts_equally(answer, world, network):
    """The parameters in their order, then zeros up to the next multiple of the world size; rank r has shard r."""
    for shapes in cases():
        shards, case = shards_of(shapes, world.size), told(shapes, world.size)
        junk = [torch.full((length,), math.nan, dtype=torch.float64) for length in map(len, shards) for _ in range(2)]
        del junk  # what new memory may contain
        flat, _ = flat_of(answer, network.group, shapes)
        numbers = [shard_values(shard, lambda name, shapes=shapes: value(shapes, name, world.rank)) for shard in shards]
        expect("the size of a shard", flat.size, len(shards[0]), case=case)
        expect("the buffer", flat.full.tolist(), sum(numbers, []), case=case)
        expect("the shard", flat.shard.tolist(), numbers[world.rank], case=case)
        expect("the shard of the gradient", flat.grad.tolist(), [0.0] * len(shards[0]), case=case)
        expect("whether the master is the shard itself", flat.master is flat.shard, True, case=case)


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
def places_in_the_shard(answer, world, network):
    """`places` has each parameter's slice of the shard and the first element in it; a name without any is left out."""
    groups = [network.group, *([network.divided_group] if world.size == 4 else [])]
    for group, shapes in itertools.product(groups, cases()):
        flat, _ = flat_of(answer, group, shapes)
        wanted = {}
        for position, element in enumerate(shards_of(shapes, group.size)[group.rank]):
            if element:
                wanted.setdefault(element[0], []).append((position, element[1]))
        found = {}
        for name, (place, first) in flat.places.items():
            positions = range(place.start or 0, flat.size if place.stop is None else place.stop, place.step or 1)
            found[name] = [(position, first + i) for i, position in enumerate(positions)]
        what = "the positions in the shard, and the parameter's elements there, by name"
        expect(what, found, wanted, case=told(shapes, group.size))


@test(points=3, ranks=(1, 3))
def flattens_other_tensors(answer, world, network):
    """`flatten` copies one tensor per parameter into a new buffer of the dtype of `like`; missing ones are zeros."""
    shapes = {"a": (5,), "b": (2, 3), "c": (), "d": (2,)}
    flat, parameters = flat_of(answer, network.group, shapes)
    shards = shards_of(shapes, world.size)
    for missing, dtype in itertools.product(("", "a", "bd", "abcd"), (torch.float64, torch.float32)):
        junk = torch.full((64,), float("nan"), dtype=dtype)  # what new memory may contain
        del junk
        tensors = {n: value(shapes, n, world.rank) for n in reversed(shapes) if n not in missing}
        if "b" in tensors:  # a transposed matrix, which requires gradients
            tensors["b"] = tensors["b"].t().contiguous().t().requires_grad_()
        got = flat.flatten(tensors, like=torch.ones(1, dtype=dtype))
        case = f"{told(shapes, world.size)}, none for {', '.join(missing) or 'no name'}"
        numbers = [
            shard_values(shard, lambda n, missing=missing: value(shapes, n, world.rank) * (n not in missing))
            for shard in shards
        ]
        expect("the flat tensor", got.tolist(), sum(numbers, []), case=case)
        expect("the dtype of the flat tensor", str(got.dtype), str(dtype), case=case)
        expect("whether the result requires gradients", got.requires_grad, False, case=case)
        got.zero_()
        expect("the names in the dictionary", sorted(tensors), sorted(set(shapes) - set(missing)), case=case)
        for name, tensor in tensors.items():
            expect(f"{name} after the result is zeroed", tensor.detach(), value(shapes, name, world.rank), case=case)
        for name, parameter in parameters.items():
            expect(f"the parameter {name}", parameter.detach(), value(shapes, name, world.rank), case=case)
    first = flat.flatten({"a": torch.ones(5, dtype=torch.float64)}, like=flat.full)
    kept = first.clone()
    flat.flatten({}, like=flat.full)
    expect("the result of an earlier call", first, kept)


@test(points=2, ranks=(1, 3))
def masters_in_a_wider_dtype(answer, world, network):
    """The buffer has the masters' values, rounded; `master` and `grad` have the masters' dtype, and own memory."""
    shapes, bf16, fp32, fp64 = {"a": (5,), "b": (2, 2), "c": ()}, torch.bfloat16, torch.float32, torch.float64
    shards = shards_of(shapes, world.size)
    for own_shard, (dtype, wide) in itertools.product((False, True), ((bf16, fp64), (fp64, fp32), (fp64, fp64))):
        exact = {name: (value(shapes, name, world.rank) + 2.0**-30).to(wide) for name in reversed(shapes)}
        before = {name: master.clone() for name, master in exact.items()}
        parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        flat = answer.FlatParameter(parameters, exact, network.group, own_shard)
        named = [str(each).removeprefix("torch.") for each in (wide, dtype)]
        case, own = f"masters in {named[0]}, parameters in {named[1]}, own_shard={own_shard}", shards[world.rank]
        wanted = shard_values(own, lambda name, exact=exact: exact[name])
        expect("this rank's shard of the masters", flat.master.tolist(), wanted, case=case)
        dtypes = [str(tensor.dtype) for tensor in (flat.master, flat.grad, flat.full, flat.shard)]
        wide_and_narrow = [str(wide)] * 2 + [str(dtype)] * 2
        expect("the dtypes of master, grad, full, shard", dtypes, wide_and_narrow, case=case)
        for name, parameter in parameters.items():
            expect(f"the parameter {name}", parameter.detach(), exact[name].to(dtype), case=case)
        rounded = torch.tensor(wanted, dtype=wide).to(dtype).tolist()
        expect("this rank's shard of the parameters", flat.shard.tolist(), rounded, case=case)
        expect("whether the master is the shard itself", flat.master is flat.shard, dtype == wide, case=case)
        flat.master.zero_()
        left = [0.0] * flat.size if dtype == wide else rounded
        expect("the shard after the master is zeroed", flat.shard.tolist(), left, case=case)
        for name, master in exact.items():
            expect(f"the given master of {name}", master, before[name], case=case)


@test(points=4, ranks=(1, 2, 3))
def gathers_and_frees(answer, world, network):
    """`free` empties the buffer and keeps the shard; `start_gather` and `wait` fill it from the shards of all ranks."""
    shapes = {"norm": (2,), "embed": (5, 4), "nothing": (0,), "head": (2, 2)}
    flat, parameters = flat_of(answer, network.group, shapes, own_shard=True)
    flat.start_gather()
    flat.wait()
    expect("operations launched for a buffer that has memory", len(network.records), 0)
    shards = shards_of(shapes, world.size)
    for turn in range(3):
        flat.shard += 1
        flat.free()
        flat.free()
        expect("bytes of the buffer after free", flat.full.untyped_storage().nbytes(), 0)
        before = len(network.records)
        flat.start_gather()
        network.event("after start_gather")
        flat.start_gather()
        expect("bytes of the buffer after start_gather", flat.full.untyped_storage().nbytes(), flat.full.numel() * 8)
        if turn == 2:
            flat.free()  # of a gather in flight: it must end first
            expect("bytes of the buffer after start_gather and free", flat.full.untyped_storage().nbytes(), 0)
            flat.start_gather()
        flat.wait()
        flat.wait()
        launched = [record.name for record in network.records[before:]]
        expect("operations", launched, ["all_gather"] * (1 + (turn == 2)) * (world.size > 1))
        for record in network.records[before:]:
            expect("whether a gather was waited for", record.waited is not None, True)
        for name, parameter in parameters.items():
            elements = [
                float(value(shapes, name, rank).flatten()[i]) + turn + 1
                for rank, shard in enumerate(shards)
                for n, i in filter(None, shard)
                if n == name
            ]
            expect(f"the parameter {name} after gather {turn + 1}", parameter.detach().flatten().tolist(), elements)
    before = len(network.records)
    empty, _ = flat_of(answer, network.group, {"nothing": (0, 3)}, own_shard=True)
    for step in (empty.free, empty.start_gather, empty.wait, empty.free):
        step()
    expect("operations launched for a buffer without elements", len(network.records) - before, 0)
    if world.size > 1:
        order = timeline(network)
        at_mark = order.index("after start_gather")
        expect("events up to the return of the first start_gather", order[:at_mark], ["launch 0"])
        expect_one_wait_per_gather(flat)


def expect_one_wait_per_gather(flat):
    """Fail unless `wait` and `free` wait once for a gather in flight, while the buffer has its memory."""
    waited, wait = [], Handle.wait

    def note(handle, *args, **options):
        waited.append(flat.full.untyped_storage().nbytes())
        return wait(handle, *args, **options)

    with mock.patch.object(Handle, "wait", note):
        for calls in (("wait", "wait", "free", "wait"), ("free", "free")):
            flat.free()
            flat.start_gather()
            waited.clear()
            for call in calls:
                getattr(flat, call)()
            case = f"one start_gather, then {', '.join(calls)}"
            expect("bytes of the buffer at each wait for the gather", waited, [flat.full.nbytes], case=case)


@test(points=1, ranks=(2,))
def memory(answer, world, network):
    """No copy of the parameters beside the buffer; own_shard adds a shard, and wide masters add their shard only."""
    shapes, half = {"a": (64, KIB), "b": (3,)}, 128  # 256 KiB in float32
    for own_shard, wide, wanted in ((False, False, 3 * half), (True, False, 4 * half), (False, True, 6 * half)):
        with LiveTensorMemory() as memory:
            parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
            masters = {name: p.detach().double() if wide else p for name, p in parameters.items()}
            flat = answer.FlatParameter(parameters, masters, network.group, own_shard)
            del masters
            case = f"256 KiB of parameters, own_shard={own_shard}, {'float64' if wide else 'float32'} masters"
            expect("KiB of buffer, shard, master and grad", memory.nbytes() // KIB, wanted, case=case)
            if own_shard:
                flat.free()
                expect("KiB after free", memory.nbytes() // KIB, 2 * half, case=case)
            expect("the number of parameters", len(parameters), 2)


def buffer_and_shard(answer, group, values):
    parameters = {"a": nn.Parameter(values), "b": nn.Parameter(torch.full((2,), 3, dtype=values.dtype))}
    flat = answer.FlatParameter(parameters, parameters, group, own_shard=False)
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
