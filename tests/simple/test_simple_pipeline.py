"""The simple trainer's pipeline against autograd in one process, in float64, with tiny stages."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from minidist.comm import GroupSpec, World, bind
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.simple.pipeline import (
    PipelineExecutor,
    gpipe,
    keep_stage_modules,
    one_f_one_b,
    split_backward,
    stage_layers,
)

WIDTH, SIZES = 5, (3, 1, 0, 2, 2, 1, 3, 2)  # samples of each micro-batch, one of which is empty
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": lambda stages, number: [split_backward(actions) for actions in one_f_one_b(stages, number)],
}


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_parameters(stage: int) -> dict[str, torch.nn.Parameter]:
    """A weight and a scale; on the first stage the weight is frozen."""
    values = {f"w{stage}": random_tensor(stage, WIDTH, WIDTH), f"scale{stage}": random_tensor(50 + stage, WIDTH)}
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    parameters[f"w{stage}"].requires_grad_(stage > 0)
    return parameters


def make_inputs(number: int) -> list[torch.Tensor]:
    return [random_tensor(100 + i, SIZES[i % len(SIZES)], WIDTH) for i in range(number)]


def run_layer(stage: int, last: int, parameters: dict, x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(x, parameters[f"w{stage}"]).tanh() * parameters[f"scale{stage}"]
    return hidden.square().sum() if stage == last else hidden


def run_pipeline(world: World, kind: str, number: int) -> tuple:
    """Run one step; return gradients, those that the executor added, forwards, and the peak in flight."""
    specs = [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
    groups = bind(world, Mesh(pp=world.size), specs)
    stage, last, added, computed, outputs = world.rank, world.size - 1, {}, [], []
    parameters = make_parameters(stage)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    inputs = make_inputs(number)

    def run_stage(i, hidden):
        computed.append(i)
        out = run_layer(stage, last, parameters, inputs[i] if stage == 0 else hidden)
        outputs.append(weakref.ref(out))
        return out

    def add(name, gradient):
        added[name] = added.get(name, 0) + gradient

    actions = SCHEDULES[kind](world.size, number)[stage]
    executor = PipelineExecutor(actions, groups["activations"], groups["gradients"], trained, add)
    empty = {i for i, x in enumerate(inputs) if len(x) == 0}
    executor.run(run_stage, lambda i: torch.empty_like(inputs[i]), empty)
    assert all(output() is None for output in outputs), "an output outlives the step"
    gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
    return gradients, added, computed, executor.peak_in_flight


def gradients_of_one_process(stages: int, number: int) -> dict[str, torch.Tensor]:
    parameters = {}
    for stage in range(stages):
        parameters |= make_parameters(stage)
    for x in make_inputs(number):
        for stage in range(stages):
            x = run_layer(stage, stages - 1, parameters, x)
        x.backward()
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("stages", "number"), [(2, 5), (3, 8), (4, 2)])
def test_gradients_are_those_of_one_process_and_few_micro_batches_are_in_flight(ranks, kind, stages, number):
    by_rank, expected = ranks(run_pipeline, stages, kind, number), gradients_of_one_process(stages, number)
    empty = sum(size == 0 for size in SIZES[:number])
    found = {}
    for stage, (gradients, added, computed, peak) in enumerate(by_rank):
        assert not (gradients.keys() & added.keys()) and bool(added) == (kind == "zb-h1")
        found |= gradients | added
        assert computed == [i for i in range(number) if SIZES[i] > 0]
        limit = number if kind == "gpipe" else stages - stage + (kind == "zb-h1")
        assert peak <= min(limit, number - empty) and (kind != "gpipe" or peak == number - empty)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-13, atol=1e-13)  # another order of sums


def evaluate(world: World) -> tuple:
    specs = [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
    groups = bind(world, Mesh(pp=world.size), specs)
    executor = PipelineExecutor([("F", 0), ("B", 0)], groups["activations"], groups["gradients"], {}, None)
    outputs = []

    def run_stage(i, hidden):
        outputs.append((torch.ones(2) * i if hidden is None else hidden) * 2)
        return outputs[-1]

    executor.run_forward(run_stage, lambda i: torch.empty(2), 3)
    return [out.tolist() for out in outputs], executor.peak_in_flight, len(executor.in_flight)


def test_evaluation_runs_forwards_alone(ranks):
    for stage, result in enumerate(ranks(evaluate, 3)):
        assert result == ([[i * 2.0 ** (stage + 1)] * 2 for i in range(3)], 0, 0)


@pytest.mark.parametrize(("layers", "stages"), [(6, 2), (7, 3), (5, 4), (3, 3)])
def test_stages_have_all_layers_once_and_differ_by_one_at_most(layers, stages):
    ranges = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [layer for each in ranges for layer in each] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert sorted(map(len, ranges), reverse=True) == list(map(len, ranges))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_keeps_its_layers_and_the_embedding_or_head(is_tied):
    names = []
    for stage in range(2):
        model = Transformer(ModelConfig(16, 8, 8, 3, 2, 1, 8, tie_embeddings=is_tied))
        keep_stage_modules(model, stage_layers(3, 2, stage))
        names.append({name for name, _ in model.named_parameters()})
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in names[1] if ".layers." in name} == {"2"}
    assert "model.embed_tokens.weight" in names[0] and "model.norm.weight" not in names[0]
    assert "model.norm.weight" in names[1] and ("model.embed_tokens.weight" in names[1]) == is_tied
