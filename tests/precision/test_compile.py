"""Compiled layers: one graph under every parallelism, with the results of eager layers."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from minidist import compile as compiled
from minidist.comm import Meter, World, bind
from minidist.config import Config, DataConfig, MeshConfig, ParallelConfig, TrainConfig, ZeroConfig
from minidist.data.loader import Batch
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.cli import main
from minidist.tools.console.next_token_logits import next_token_logits
from minidist.train.engine import Engine

SEQ_LEN = 24
DEADLINE_S = 240.0  # a graph takes seconds to make, on a busy machine tens


def make_config(mesh: dict, parallel: dict | None = None, recompute: str = "none", stage: int = 0) -> Config:
    return Config(
        model=ModelConfig(56, 32, 44, 4, num_heads=4, num_kv_heads=2, dropout=0.1),
        data=DataConfig(seq_len=SEQ_LEN),
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(global_batch=8, micro_batches=4),
        zero=ZeroConfig(stage=stage),
        compile=True,
        recompute=recompute,
    )


def micro_batches(replica: int) -> list[Batch]:
    """Four, of 2 samples each: compiled once."""
    results = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * replica + number)
        tokens, labels = torch.randint(56, (2, 2, SEQ_LEN), generator=generator)
        results.append(Batch(tokens.clone(), labels.clone(), torch.arange(2) + 2 * number + 8 * replica))
    return results


def step_eager_and_compiled(world: World, configs: list[Config]) -> list[list]:
    """One step of every configuration, compiled and eager: loss, gradient norm, gradients, bytes sent, graphs."""
    compiled.BACKEND = "aot_eager"  # in this rank's process: graphs as of inductor, without its code
    return [[run_step(world, dataclasses.replace(config, compile=on)) for on in (True, False)] for config in configs]


def run_step(world: World, config: Config) -> tuple:
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, seed=1)
    engine = Engine(parallelize(model.double(), groups, config), groups, config.optim, seed=1)
    engine.model.train()
    groups.meter.wire_bytes.clear()
    batches, grads = micro_batches(mesh.coords(world.rank)["dp"]), {}

    def look():
        grads.update({name: grad.clone() for name, grad in engine.reducer.gradients().items() if grad is not None})

    before = counters["stats"]["unique_graphs"]
    result = engine.step(0, batches, lr=0.1, on_gradients_reduced=look)
    sent = dict(groups.meter.wire_bytes)
    engine.model.eval()
    next_token_logits(engine, torch.zeros((1, 3), dtype=torch.int64))  # another shape, for which nothing is compiled
    graphs = counters["stats"]["unique_graphs"] - before
    groups.destroy()
    return result.loss, result.grad_norm, grads, sent, graphs


SINGLE = [make_config({})]
PAIRS = [
    make_config({"tp": 2}, {"sequence": True}, "block"),
    make_config({"dp": 2}, stage=3, recompute="block"),
]
MORE_PAIRS = [
    make_config({"tp": 2}),
    make_config({"cp": 2}),  # its compiled layers also in tests/parallel/test_context_parallel.py
    make_config({"cp": 2}, {"context": "ulysses"}),
    make_config({"pp": 2}, recompute="block"),
    make_config({"pp": 2}, {"schedule": "interleaved"}),
]


@pytest.mark.parametrize(
    "world, configs", [(1, SINGLE), (2, PAIRS), pytest.param(2, MORE_PAIRS, marks=pytest.mark.exhaustive)]
)
def test_a_compiled_step_equals_the_eager_one(ranks, world, configs):
    for found in ranks(step_eager_and_compiled, world, configs, deadline_s=DEADLINE_S):
        for config, (on, off) in zip(configs, found, strict=True):
            # The same operations in float64; a compiler may add gradients of a tensor up in another order.
            torch.testing.assert_close(on[:3], off[:3], rtol=1e-12, atol=1e-12)
            assert on[2].keys() == off[2].keys() and len(on[2]) > 9
            assert on[3] == off[3], config.mesh
            # One graph for all layers and micro-batches; a layout whose layers are whole has that of the one before.
            whole = config.mesh.tp == config.mesh.cp == 1
            assert off[4] == 0 and (on[4] == 1 or (whole and world > 1 and on[4] == 0)), config


@pytest.mark.parametrize(
    "words, output",
    [
        ("--mesh.pp 2 --train.micro-batches 4 --parallel.schedule zb-h1", "give --no-compile, or --parallel.schedule"),
        ("--recompute selective", "give --recompute none or block, or --no-compile"),
    ],
)
def test_options_incompatible_with_compile_are_refused(capsys, words, output):
    for command in ("train", "estimate"):
        assert main([command, "--device", "cpu", "--ranks", "2", "--compile", *words.split()]) == 2
        assert output in capsys.readouterr().err


def test_the_estimate_says_that_the_compiler_decides(capsys):
    assert main(["estimate", "--ranks", "2", "--compile"]) == 0
    assert "compile: the compiler decides which tensors a compiled layer saves" in capsys.readouterr().out
