"""The pipeline executor against autograd in one process, with tiny stages whose every event is checked."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parallel.data.reducer import register_gradient_hooks
from minidist.parallel.pipeline.executor import PipelineExecutor
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.parallel.pipeline.split import ModuleOnOtherStage, keep_stage_modules
from minidist.parallel.pipeline.split_backward import DeferWeightGradients, compute_weight_gradient
from minidist.tools.deadlock.nccl_rules import find_nccl_violations
from minidist.tools.simulate.check import peak_live_micro_batches
from minidist.validation import SCHEDULES

WIDTH, SIZES = 5, (3, 1, 0, 2, 2, 1, 3, 2)  # samples of each micro-batch, one of which is empty


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def make_inputs(micro_batches: int) -> list[torch.Tensor]:
    return [random_tensor(f"x{m}", SIZES[m % len(SIZES)], WIDTH) for m in range(micro_batches)]


def model_part(position: int, end: int, weights: dict, x: torch.Tensor) -> torch.Tensor:
    """One part of the model: a linear layer and a scale, followed by a loss in the last part."""
    hidden = F.linear(x, weights[f"w{position}"]).tanh() * weights[f"scale{position}"]
    return hidden.square().sum() if position == end else hidden


def make_parameters(positions: list[int]) -> dict[str, torch.nn.Parameter]:
    named = {f"w{p}": random_tensor(f"w{p}", WIDTH, WIDTH) for p in positions}
    named |= {f"scale{p}": random_tensor(f"scale{p}", WIDTH) for p in positions}
    return {name: torch.nn.Parameter(value) for name, value in named.items()}


class RecordingReducer:
    """A gradient reducer that sums gradients and records the order of calls."""

    def __init__(self):
        self.sums, self.events = {}, []

    def accumulate(self, name, grad):
        assert ("ready", name) not in self.events
        self.events.append(("add", name))
        self.sums[name] = self.sums.get(name, 0) + grad.detach().clone()

    def mark_ready(self, name):
        self.events.append(("ready", name))

    def finish_micro_batch(self, chunk):
        pass


def run_pipeline(world: World, kind: str, micro_batches: int) -> tuple:
    made = build_schedule(kind, world.size, micro_batches)
    uses = [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
    groups = bind(world, Mesh(pp=world.size), uses, meter=Meter())
    chunk_of = {made.position(world.rank, chunk): chunk for chunk in range(made.num_chunks)}
    parameters, reducer, end = make_parameters(list(chunk_of)), RecordingReducer(), made.num_parts - 1
    used_by = {name: (chunk_of[int(name.removeprefix("scale").removeprefix("w"))],) for name in parameters}
    shared = ["scale0"] if 0 in chunk_of else []
    transfers = groups["activations"], groups["gradients"]
    executor = PipelineExecutor(made, transfers, reducer, parameters, used_by, shared)
    for name, parameter in parameters.items():
        register_gradient_hooks({name: parameter}, reducer, partial(executor.is_last_backward, name))
    inputs, computed, kept = make_inputs(micro_batches), [], []

    def part(chunk, micro_batch, hidden):
        position = made.position(world.rank, chunk)
        computed.append((chunk, micro_batch))
        out = model_part(position, end, parameters, inputs[micro_batch] if position == 0 else hidden)
        kept.append(weakref.ref(out))
        return out

    empty = [m for m, x in enumerate(inputs) if len(x) == 0]
    executor.run(part, lambda m: torch.empty_like(inputs[m]), empty)
    assert all(ref() is None for ref in kept), "an output outlives the step"
    return reducer.sums, reducer.events, computed, executor.peak_live, groups.meter.records


def run_in_one_process(kind: str, stages: int, micro_batches: int) -> dict[str, torch.Tensor]:
    positions = build_schedule(kind, stages, micro_batches).num_parts
    parameters = make_parameters(list(range(positions)))
    for x in make_inputs(micro_batches):
        for position in range(positions):
            x = model_part(position, positions - 1, parameters, x)
        x.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}


CASES = [(kind, stages, 2 * stages) for kind in SCHEDULES for stages in (2, 4)] + [("1f1b", 3, 2), ("zb-v", 3, 7)]


@pytest.mark.parametrize(("kind", "stages", "micro_batches"), CASES)
def test_gradients_match_one_process_in_schedule_order_within_peak_memory(ranks, kind, stages, micro_batches):
    made, expected = build_schedule(kind, stages, micro_batches), run_in_one_process(kind, stages, micro_batches)
    by_rank = ranks(run_pipeline, stages, kind, micro_batches)
    assert find_nccl_violations({rank: records for rank, (*_, records) in enumerate(by_rank)}) == []
    empty = SIZES.index(0)
    for stage, (sums, events, computed, alive, _) in enumerate(by_rank):
        for name, grad in sums.items():
            # A sum of some ten products in another order, in float64.
            torch.testing.assert_close(grad, expected[name], rtol=1e-13, atol=1e-13)
        parts = {made.position(stage, chunk) for chunk in range(made.num_chunks)}
        assert sums.keys() == {f"{what}{position}" for what in ("w", "scale") for position in parts}
        order = made.orders[stage]
        assert computed == [
            (action.chunk, action.micro_batch) for action in order if action.kind == "F" and action.micro_batch != empty
        ]
        if micro_batches <= empty:  # an empty micro-batch keeps no activations
            assert alive == peak_live_micro_batches(made)[stage]
        assert alive <= peak_live_micro_batches(made)[stage]
        for name in sums:
            told = [event for event, about in events if about == name]
            assert "add" not in told[told.index("ready") :] if name != "scale0" else "ready" not in told
            assert name == "scale0" or told.count("ready") >= 1


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_1f1b_keeps_one_micro_batch_live_per_later_stage(ranks, micro_batches):
    for stage, (_, _, _, alive, _) in enumerate(ranks(run_pipeline, 4, "1f1b", micro_batches)):
        alive_without_empty = min(4 - stage, micro_batches)
        assert alive_without_empty - (micro_batches > 2) <= alive <= alive_without_empty


def reducer_events(world: World) -> list:
    *_, events = [], run_pipeline(world, "zb-h1", 4)[1]
    return events


def test_weight_gradients_are_added_in_schedule_order(ranks):
    """On the first of two stages ZB-H1 runs F0 F1 B0 W0 ...; on the last stage W0 comes after B1."""
    made = build_schedule("zb-h1", 2, 4)
    for stage, events in enumerate(ranks(reducer_events, 2)):
        order = [action for action in made.orders[stage] if action.kind != "F" and action.micro_batch != SIZES.index(0)]
        expected = [("add", f"scale{stage}" if action.kind == "B" else f"w{stage}") for action in order]
        assert [event for event in events if event[0] == "add"] == expected


def test_split_backward_of_a_linear_layer_equals_its_backward():
    x, weight = random_tensor("x", 2, 3, 4).requires_grad_(), torch.nn.Parameter(random_tensor("w", 5, 4))
    (F.linear(x, weight) ** 2).sum().backward()
    expected, x.grad, weight.grad = (x.grad, weight.grad), None, None
    deferred = []
    with DeferWeightGradients({weight: "w"}, deferred):
        out = F.linear(x, weight, None)
        whole = F.linear(x.detach(), weight)  # the input takes no gradient, so nothing waits for an early B
    (out**2).sum().backward()
    ((name, _, _),) = deferred
    assert name == "w" and weight.grad is None
    torch.testing.assert_close((x.grad, compute_weight_gradient(deferred[0])), expected, rtol=1e-14, atol=1e-14)
    whole.sum().backward()
    assert weight.grad is not None and len(deferred) == 1


def test_a_stage_keeps_its_layers_and_the_embedding_or_head():
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


def test_zb_v_keeps_tied_embedding_and_head_as_one_tensor():
    model = Transformer(ModelConfig(16, 8, 8, 4, 2, 1, 8))
    used_by = keep_stage_modules(
        model, build_schedule("zb-v", 2, 2), 0, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    )
    assert used_by["model.embed_tokens.weight"] == (0, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_calling_a_layer_of_another_stage_raises():
    with pytest.raises(RuntimeError, match="layer 3 was called, and another stage of the pipeline holds it"):
        ModuleOnOtherStage("layer 3")(torch.ones(1))
