"""The executor against autograd on one process, with parts so small that every event can be looked at."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.models import ModelConfig, Transformer
from minidist.parallel.data.reducer import collect
from minidist.parallel.pipeline.check import peak_live_micro_batches
from minidist.parallel.pipeline.executor import PipelineExecutor
from minidist.parallel.pipeline.schedules import KINDS, build_schedule
from minidist.parallel.pipeline.split import ModuleOnOtherStage, keep_stage_modules
from minidist.parallel.pipeline.split_backward import DeferWeightGradients, weight_gradient
from minidist.tools.deadlock.nccl_rules import violations

WIDTH, SIZES = 5, (3, 1, 0, 2, 2, 1, 3, 2)  # samples of each micro-batch: different, one of them without any


def values(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def data(micro_batches: int) -> list[torch.Tensor]:
    return [values(f"x{m}", SIZES[m % len(SIZES)], WIDTH) for m in range(micro_batches)]


def part_of(position: int, end: int, weights: dict, x: torch.Tensor) -> torch.Tensor:
    """One part of a model: a linear layer and a scale, and at the end a loss."""
    hidden = F.linear(x, weights[f"w{position}"]).tanh() * weights[f"scale{position}"]
    return hidden.square().sum() if position == end else hidden


def parameters_of(positions: list[int]) -> dict[str, torch.nn.Parameter]:
    named = {f"w{p}": values(f"w{p}", WIDTH, WIDTH) for p in positions}
    named |= {f"scale{p}": values(f"scale{p}", WIDTH) for p in positions}
    return {name: torch.nn.Parameter(value) for name, value in named.items()}


class Reducer:
    """Sums what comes, and writes down when."""

    def __init__(self):
        self.sums, self.events = {}, []

    def add(self, name, grad):
        assert ("ready", name) not in self.events
        self.events.append(("add", name))
        self.sums[name] = self.sums.get(name, 0) + grad.detach().clone()

    def ready(self, name):
        self.events.append(("ready", name))


def through_stages(world: World, kind: str, micro_batches: int) -> tuple:
    made = build_schedule(kind, world.size, micro_batches)
    uses = [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
    groups = bind(world, Mesh(pp=world.size), uses, meter=Meter())
    chunk_of = {made.position(world.rank, chunk): chunk for chunk in range(made.chunks)}
    parameters, reducer, end = parameters_of(list(chunk_of)), Reducer(), made.positions - 1
    used_by = {name: (chunk_of[int(name.removeprefix("scale").removeprefix("w"))],) for name in parameters}
    shared = ["scale0"] if 0 in chunk_of else []
    executor = PipelineExecutor(
        made, (groups["activations"], groups["gradients"]), reducer, parameters, used_by, shared
    )
    collect(parameters, executor, lambda: True)
    inputs, computed, kept = data(micro_batches), [], []

    def part(chunk, micro_batch, hidden):
        position = made.position(world.rank, chunk)
        computed.append((chunk, micro_batch))
        out = part_of(position, end, parameters, inputs[micro_batch] if position == 0 else hidden)
        kept.append(weakref.ref(out))
        return out

    empty = [m for m, x in enumerate(inputs) if len(x) == 0]
    executor.run(part, lambda m: torch.empty_like(inputs[m]), empty)
    assert all(ref() is None for ref in kept), "an output outlives the step"
    return reducer.sums, reducer.events, computed, executor.peak_live, groups.meter.records


def on_one(kind: str, stages: int, micro_batches: int) -> dict[str, torch.Tensor]:
    positions = build_schedule(kind, stages, micro_batches).positions
    parameters = parameters_of(list(range(positions)))
    for x in data(micro_batches):
        for position in range(positions):
            x = part_of(position, positions - 1, parameters, x)
        x.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}


CASES = [(kind, stages, 2 * stages) for kind in KINDS for stages in (2, 4)] + [("1f1b", 3, 2), ("zb-v", 3, 7)]


@pytest.mark.parametrize(("kind", "stages", "micro_batches"), CASES)
def test_gradients_order_and_memory(ranks, kind, stages, micro_batches):
    made, wanted = build_schedule(kind, stages, micro_batches), on_one(kind, stages, micro_batches)
    seen = ranks(through_stages, stages, kind, micro_batches)
    assert violations({rank: records for rank, (*_, records) in enumerate(seen)}) == []
    empty = SIZES.index(0)
    for stage, (sums, events, computed, alive, _) in enumerate(seen):
        for name, grad in sums.items():
            # A sum of some ten products in another order, in float64.
            torch.testing.assert_close(grad, wanted[name], rtol=1e-13, atol=1e-13)
        parts = {made.position(stage, chunk) for chunk in range(made.chunks)}
        assert sums.keys() == {f"{what}{position}" for what in ("w", "scale") for position in parts}
        order = made.orders[stage]
        assert computed == [(op.chunk, op.micro_batch) for op in order if op.kind == "F" and op.micro_batch != empty]
        if micro_batches <= empty:  # a micro-batch that is not there is not alive
            assert alive == peak_live_micro_batches(made)[stage]
        assert alive <= peak_live_micro_batches(made)[stage]
        for name in sums:
            told = [event for event, about in events if about == name]
            assert "add" not in told[told.index("ready") :] if name != "scale0" else "ready" not in told
            assert name == "scale0" or told.count("ready") >= 1


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_1f1b_keeps_as_many_alive_as_there_are_stages_ahead(ranks, micro_batches):
    for stage, (_, _, _, alive, _) in enumerate(ranks(through_stages, 4, "1f1b", micro_batches)):
        alive_without_empty = min(4 - stage, micro_batches)
        assert alive_without_empty - (micro_batches > 2) <= alive <= alive_without_empty


def halves_in_order(world: World) -> list:
    *_, events = [], through_stages(world, "zb-h1", 4)[1]
    return events


def test_a_weight_half_waits_for_its_turn(ranks):
    """On the first of two stages ZB-H1 runs F0 F1 B0 W0 ... and on the last the weight half of 0 comes after B1."""
    made = build_schedule("zb-h1", 2, 4)
    for stage, events in enumerate(ranks(halves_in_order, 2)):
        order = [op for op in made.orders[stage] if op.kind != "F" and op.micro_batch != SIZES.index(0)]
        expected = [("add", f"scale{stage}" if op.kind == "B" else f"w{stage}") for op in order]
        assert [event for event in events if event[0] == "add"] == expected


def test_the_two_halves_of_a_linear_layer_are_its_backward():
    x, weight = values("x", 2, 3, 4).requires_grad_(), torch.nn.Parameter(values("w", 5, 4))
    (F.linear(x, weight) ** 2).sum().backward()
    wanted, x.grad, weight.grad = (x.grad, weight.grad), None, None
    halves = []
    with DeferWeightGradients({weight: "w"}, halves):
        out = F.linear(x, weight, None)
        whole = F.linear(x.detach(), weight)  # takes no gradient: there is nobody to be quick for
    (out**2).sum().backward()
    ((name, _, _),) = halves
    assert name == "w" and weight.grad is None
    torch.testing.assert_close((x.grad, weight_gradient(halves[0])), wanted, rtol=1e-14, atol=1e-14)
    whole.sum().backward()
    assert weight.grad is not None and len(halves) == 1


def test_a_stage_holds_its_layers_and_the_ends_that_belong_to_them():
    made = build_schedule("interleaved", 2, 2)
    held = []
    for stage in range(2):
        model = Transformer(ModelConfig(16, 8, 8, 6, 2, 1, 8))
        used_by = keep_stage_modules(model, made, stage, [range(0, 2), range(2, 3), range(3, 5), range(5, 6)])
        held.append(used_by)
        assert used_by.keys() == {name for name, _ in model.named_parameters()}
    assert {int(name.split(".")[2]) for name in held[0] if "layers" in name} == {0, 1, 3, 4}
    assert held[0]["model.layers.3.mlp.up_proj.weight"] == (1,) and held[0]["model.embed_tokens.weight"] == (0,)
    assert held[1]["model.norm.weight"] == (1,) and held[1]["model.embed_tokens.weight"] == (1,)
    assert "lm_head.weight" not in held[1]  # it is the embedding's


def test_in_a_v_the_tied_ends_are_one_tensor_on_one_stage():
    model = Transformer(ModelConfig(16, 8, 8, 4, 2, 1, 8))
    used_by = keep_stage_modules(
        model, build_schedule("zb-v", 2, 2), 0, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    )
    assert used_by["model.embed_tokens.weight"] == (0, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_is_elsewhere_says_so():
    with pytest.raises(RuntimeError, match="layer 3 was called, and another stage of the pipeline holds it"):
        ModuleOnOtherStage("layer 3")(torch.ones(1))
