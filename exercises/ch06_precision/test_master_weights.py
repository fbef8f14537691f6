"""Tests of master_weights: the reference keeps every weight in float64."""

import torch
from torch import nn

from exercises.conditions import FLOATS, Choices, Declaration, Growth, Tensors, check_conditions
from exercises.observations import PeakMemory
from exercises.testing import Wrong, expect, test

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = {"weight": (2, 3), "bias": (5,), "scale": ()}
NUMEL = 250_000
NUM_EQUAL = 4  # parameters of the model of which memory is measured


def exact(name, dtype=FP64):
    """Values between 1 and 1.5 that have more digits than 16 bits do, in float64 more than float32 has."""
    generator = torch.Generator().manual_seed(len(name))
    return (1 + torch.rand(SHAPES[name], generator=generator, dtype=FP64) / 2).to(dtype)


def make_model(dtype=FP32):
    """A model with one parameter of each shape, in `dtype`."""
    model = nn.Module()
    for name in SHAPES:
        model.register_parameter(name, nn.Parameter(exact(name, dtype)))
    return model


def named(dtype):
    return str(dtype).removeprefix("torch.")


def expect_names(masters, names, case):
    if not isinstance(masters, dict):
        raise Wrong("type", "the masters must be a dict by name", "dict", type(masters).__name__)
    expect("the names of the masters", list(masters), list(names), case=case)


@test(points=4)
def copies_of_unrounded_values(answer):
    """With a 16-bit dtype the masters are fp32 copies of the values before they were rounded."""
    for before in (FP32, FP64, BF16):
        for dtype in (BF16, FP16):
            model = make_model(before)
            objects = dict(model.named_parameters())
            masters = answer.make_masters(model, dtype)
            case = f"a model in {named(before)}, make_masters(model, {named(dtype)})"
            expect_names(masters, SHAPES, case)
            for name, parameter in model.named_parameters():
                value = exact(name, before)
                expect(f"whether model.{name} is the same Parameter", parameter is objects[name], True, case=case)
                expect(f"the dtype of model.{name}", named(parameter.dtype), named(dtype), case=case)
                expect(f"model.{name}", parameter.detach(), value.to(dtype), case=case)
                expect(f"the dtype of master {name}", named(masters[name].dtype), "float32", case=case)
                expect(f"master {name}", masters[name].detach(), value.to(FP32), case=case)
            masters["weight"].data.add_(1)
            unchanged = exact("weight", before).to(dtype)
            expect("model.weight after its master has changed", model.weight.detach(), unchanged, case=case)


@test(points=2)
def wide_parameters_are_their_own_masters(answer):
    """With float32 and float64 the masters are the parameters, and an update needs no copy back."""
    for before, dtype in ((FP32, FP32), (FP64, FP64), (FP64, FP32), (FP32, FP64), (BF16, FP32)):
        model = make_model(before)
        objects = dict(model.named_parameters())
        masters = answer.make_masters(model, dtype)
        case = f"a model in {named(before)}, make_masters(model, {named(dtype)})"
        expect_names(masters, SHAPES, case)
        for name, parameter in model.named_parameters():
            is_same = masters[name] is parameter and parameter is objects[name]
            expect(f"whether master {name} is the Parameter model.{name}", is_same, True, case=case)
            expect(f"the dtype of model.{name}", named(parameter.dtype), named(dtype), case=case)
            expect(f"model.{name}", parameter.detach(), exact(name, before).to(dtype), case=case)
        with torch.no_grad():
            masters["bias"] += 1
        answer.copy_to_parameters(masters, dict(model.named_parameters()))
        expect("model.bias after an update", model.bias.detach(), exact("bias", before).to(dtype) + 1, case=case)


@test(points=2)
def frozen_and_tied_parameters(answer):
    """A frozen parameter is narrowed and has no master; a tied one has one; buffers stay as they are."""
    for dtype in (BF16, FP32):
        model = make_model()
        model.weight.requires_grad_(False)
        model.head = nn.Linear(1, 5, bias=False)
        model.head.weight = nn.Parameter(exact("bias", FP32).view(5, 1))
        model.tail = nn.Linear(1, 5, bias=False)
        model.tail.weight = model.head.weight
        model.scale = nn.Parameter(exact("scale", BF16))  # in another dtype than the rest
        model.register_buffer("count", torch.tensor([3.25], dtype=FP32))
        masters = answer.make_masters(model, dtype)
        case = f"weight is frozen, tail.weight is tied to head.weight; make_masters(model, {named(dtype)})"
        expect_names(masters, ["bias", "scale", "head.weight"], case)
        expect("the dtype of the frozen parameter", named(model.weight.dtype), named(dtype), case=case)
        expect("the frozen parameter", model.weight.detach(), exact("weight", FP32).to(dtype), case=case)
        needs = [parameter.requires_grad for parameter in model.parameters()]
        expect(
            "which parameters require gradients: weight, bias, scale, head", needs, [False, True, True, True], case=case
        )
        found = [(named(each.dtype), each.item()) for each in (model.scale, masters["scale"])]
        scale = exact("scale", BF16).item()
        wanted = [(named(dtype), scale), ("float32", scale)]
        expect("dtype and value of model.scale, which was in bfloat16, and of its master", found, wanted, case=case)
        expect("whether the tied parameters are one", model.tail.weight is model.head.weight, True, case=case)
        expect("the buffer", (named(model.count.dtype), model.count), ("float32", [3.25]), case=case)
        with torch.no_grad():
            masters["head.weight"] += 1
        answer.copy_to_parameters(masters, {"head.weight": model.head.weight})
        wanted = (exact("bias", FP32).view(5, 1) + 1).to(dtype)
        expect("tail.weight after an update of its master", model.tail.weight.detach(), wanted, case=case)


@test(points=2)
def small_updates_add_up(answer):
    """Two hundred updates, each too small for the parameters' dtype, move them as far as one 200 times as large."""
    for dtype, update in ((BF16, 2.0**-12), (FP16, 2.0**-15)):
        model = make_model()
        masters, parameters = answer.make_masters(model, dtype), dict(model.named_parameters())
        optimizer = torch.optim.SGD(masters.values(), lr=update)
        for step in range(200):
            for master in masters.values():
                master.grad = torch.ones_like(master)
            optimizer.step()
            answer.copy_to_parameters(masters, parameters)
            case = f"{step + 1} updates of {-update}, parameters in {named(dtype)}"
            for name, parameter in parameters.items():
                # Multiples of 2**-23 between 1/2 and 2 are exact in float32.
                moved = exact(name, FP32).double() - (step + 1) * update
                expect(f"master {name}", masters[name].detach().double(), moved, case=case)
                expect(f"the dtype of parameter {name}", named(parameter.dtype), named(dtype), case=case)
                expect(f"parameter {name}, which is its master rounded", parameter.detach(), moved.to(dtype), case=case)


@test(points=2)
def overwrites_the_given_parameters(answer):
    """The values are overwritten in place, of the given parameters only, and the masters are not touched."""
    model = make_model()
    masters = answer.make_masters(model, BF16)
    views = {name: parameter.data for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for master in masters.values():
            master += 1
    answer.copy_to_parameters(masters, {"bias": model.bias, "scale": model.scale})
    case = "all masters have changed; copy_to_parameters(masters, {bias and scale})"
    moved = {name: exact(name, FP32) + 1 for name in SHAPES}
    for name in ("bias", "scale"):
        expect(f"model.{name}", model.get_parameter(name).detach(), moved[name].to(BF16), case=case)
        expect(f"a view of model.{name}, from before", views[name], moved[name].to(BF16), case=case)
    expect("model.weight", model.weight.detach(), exact("weight", FP32).to(BF16), case=case)
    for name, master in masters.items():
        expect(f"master {name}", master.detach(), moved[name], case=case)
    needs = [parameter.requires_grad for parameter in model.parameters()]
    expect("whether the parameters require gradients", needs, [True] * 3, case=case)


@test(points=1)
def memory_of_one_copy(answer):
    """Copying takes no more than 4 bytes per element of a parameter for a while."""
    model = nn.Module()
    for number in range(NUM_EQUAL):
        model.register_parameter(f"p{number}", nn.Parameter(torch.ones(NUMEL)))
    masters, case = answer.make_masters(model, BF16), "a model of 4 fp32 parameters of 1 MB each, in bf16"
    expect_names(masters, dict(model.named_parameters()), case)
    with torch.no_grad():
        masters["p3"] += 1
    with PeakMemory() as memory:
        answer.copy_to_parameters(masters, dict(model.named_parameters()))
    expect("the last element of the last parameter, whose master was changed", model.p3[-1].item(), 2.0, case=case)
    most = memory.peak_bytes / NUMEL
    expect(f"at most 4.1 bytes per element of a parameter to copy it, not {most:.1f}", most <= 4.1, True, case=case)


def update_masters(answer, group, values, dtype):
    """Return the masters of a model with some equal parameters, and the model, after an update that doubles them."""
    model = nn.Module()
    for number in range(NUM_EQUAL):
        model.register_parameter(f"p{number}", nn.Parameter(values.clone()))
    masters = answer.make_masters(model, dtype)
    with torch.no_grad():
        for master in masters.values():
            master *= 2  # which every dtype sees, however large the values are
    answer.copy_to_parameters(masters, dict(model.named_parameters()))
    return masters, model


def masters_and_parameters(answer, group, values, dtype):
    masters, model = update_masters(answer, group, values, dtype)
    return [master.detach() for master in masters.values()], [p.detach() for p in model.parameters()]


def updated_by_one_process(ranks, rank):
    values, dtype = ranks[rank]["values"], ranks[rank]["dtype"]
    master = values.to(FP32 if dtype in (BF16, FP16) else dtype) * 2
    return [master] * NUM_EQUAL, [master.to(dtype)] * NUM_EQUAL


DECLARATION = Declaration(
    inputs={
        "values": Tensors(
            dtypes=(FP32, *(each for each in FLOATS if each != FP32)), layouts=("slice", "transposed", "scalar")
        ),
        "dtype": Choices((BF16, FP16, FP32, FP64)),
    },
    call=masters_and_parameters,
    reference=updated_by_one_process,
    growth=Growth(
        ({"values": {"numel": 50_000}}, {"values": {"numel": 100_000}}),
        # Masters and 16-bit parameters are 6 bytes per element, and the old values 4 until all are converted.
        peak_bytes=lambda arguments, ranks: 10 * NUM_EQUAL * arguments["values"].numel(),
        kept_bytes=lambda arguments, ranks: 6 * NUM_EQUAL * arguments["values"].numel(),
        call=update_masters,
    ),
)


@test(points=1)
def holds_under_every_condition(answer, world, network):
    """Any dtype, size and memory layout, NaN and infinities; masters and 16-bit parameters are 6 bytes per element."""
    check_conditions(DECLARATION, answer, world, network)
