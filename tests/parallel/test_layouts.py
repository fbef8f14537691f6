"""The trainer in every layout: checkpoints, evaluation loss and next-token logits match one process."""

import json
import math

import numpy as np
import pytest
import torch

from minidist.comm import World, bind
from minidist.config import CheckpointConfig, Config, ModelConfig
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.console.next_token_logits import next_token_logits
from minidist.tools.console.sample_text import continue_text, sample_text
from minidist.train.engine import Engine
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import Stop, make_trainer, small_config, with_changes, write_text

MODEL = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=4, num_heads=4, num_kv_heads=2, dropout=0.1)
LAYOUTS = {
    "pp tp": (4, {"mesh__pp": 2, "mesh__tp": 2, "parallel__schedule": "zb-h1", "parallel__sequence": True}),
    "cp dp": (4, {"mesh__cp": 2, "mesh__dp": 2}),
    "v": (2, {"mesh__pp": 2, "parallel__schedule": "zb-v"}),
    "ulysses tp": (4, {"mesh__cp": 2, "mesh__tp": 2, "parallel__context": "ulysses"}),
    "heads": (4, {"mesh__tp": 4}),
    "zero 3": (3, {"zero__stage": 3}),
    "zero 3 pp": (4, {"mesh__pp": 2, "mesh__dp": 2, "zero__stage": 3}),
    "zero 2 tp": (4, {"mesh__dp": 2, "mesh__tp": 2, "zero__stage": 2}),
}


def train(world: World, config: Config) -> dict:
    return make_trainer(world, config).run(Stop())


def read_losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row] + [r["held_out_loss"] for r in rows if "held_out_loss" in r]


@pytest.mark.parametrize("tied", [True, *exhaustive(False)])
def test_a_run_resumes_in_one_layout_after_the_other(ranks, tmp_path, tied):
    """Two steps in each, under AdamW: moments and step counts move with their boxes."""
    whole = small_config(
        tmp_path / "whole",
        write_text(tmp_path),
        model=MODEL,
        model__tie_embeddings=tied,
        optim__kind="adamw",
        optim__lr=1e-3,
        optim__eps=1e-5,
        train__steps=2 * len(LAYOUTS),
        train__micro_batches=3,
        checkpoint__every=2,
    )
    ranks(train, 1, whole)
    before = None
    for number, (world, layout) in enumerate(LAYOUTS.values(), 1):
        kept = CheckpointConfig(every=2, resume=before and tmp_path / before / "checkpoints", inherit=False)
        own = with_changes(whole, folder=tmp_path / str(number), checkpoint=kept, **layout)
        # The learning-rate schedule is that of the full run: each run is stopped after two steps, not made shorter.
        ranks(train_two_steps, world, own)
        before = str(number)
    # The metrics file of a resumed run begins with the rows of the run before it.
    losses, expected = read_losses(tmp_path / before), read_losses(tmp_path / "whole")
    assert len(losses) == len(expected) == 2 * len(LAYOUTS) + 1
    # float32: a loss is 2e-6 off after some steps of AdamW with this eps, as in parity.
    assert losses == pytest.approx(expected, rel=5e-6)


def train_two_steps(world: World, config: Config) -> None:
    trainer = make_trainer(world, config)
    is_last = trainer.progress.step + 2 == config.train.steps  # which ends with an evaluation
    trainer.run(Stop(None if is_last else 2, trainer))


PROMPT = np.array([3, 1, 4])


def evaluate_and_sample(world: World, config: Config) -> tuple:
    """The evaluation loss (with two micro-batch counts), next-token logits, and sampled text where this rank has it."""
    groups = bind(world, mesh := config.mesh_of(world.size), group_specs(mesh, config))
    model = Transformer(config.model)
    init_parameters(model, 3)
    engine = Engine(parallelize(model.double(), groups, config), groups, config.optim, 0)
    loader = Loader(generate_text(2000), 16, 1, min_length=3)
    loss = engine.evaluate(loader.micro_batches(0, 7, mesh.coords(world.rank)["dp"], mesh.dp, 3))
    logits = [next_token_logits(engine, torch.arange(n)[None] % 7 + torch.arange(2)[:, None]) for n in (1, 5, 11)]
    loss_again = engine.evaluate(loader.micro_batches(0, 7, mesh.coords(world.rank)["dp"], mesh.dp, 1))
    return loss, loss_again, torch.stack(logits), sample_text(engine, config, PROMPT)


QUICK = ("pp tp", "cp dp", "v", "simple pp", "zero 3")  # every axis of the mesh, a V schedule, and ZeRO


@pytest.mark.parametrize("name", ["one", *QUICK, *exhaustive(*(name for name in LAYOUTS if name not in QUICK))])
def test_evaluation_and_next_token_match_one_process_in_every_layout(ranks, name):
    world, layout = LAYOUTS.get(name, (1, {}))
    plain = with_changes(Config(model=MODEL), data__seq_len=16, train__micro_batches=3, train__sample_tokens=6)
    model = Transformer(MODEL)
    init_parameters(model, 3)
    model = model.double().eval()
    with torch.no_grad():
        batch = Loader(generate_text(2000), 16, 1, min_length=3).global_batch(0, 7)
        loss_sum, count = model(batch.tokens, batch.labels)
        logits = [model(torch.arange(n)[None] % 7 + torch.arange(2)[:, None])[:, -1] for n in (1, 5, 11)]
    text = continue_text(model, bytes(PROMPT.tolist()), plain)
    by_rank = ranks(evaluate_and_sample, world, with_changes(plain, **layout))
    assert by_rank[0][3] == text and {told for *_, told in by_rank} <= {text, None}
    for loss, again, found, _ in by_rank:
        # Sums in another order, in float64.
        assert loss == pytest.approx((loss_sum / count).item(), rel=1e-12) and again == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(found, torch.stack(logits), rtol=0, atol=1e-12)


def gradients_with_frozen_weights(world: World, config: Config) -> dict:
    groups = bind(world, mesh := config.mesh_of(world.size), group_specs(mesh, config))
    model = Transformer(config.model).double()
    init_parameters(model, 3)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(False)
    engine = Engine(parallelize(model, groups, config), groups, config.optim, 0)
    grads = {}

    def look():
        grads.update({name: p.grad.clone() for name, p in engine.parameters.items() if p.grad is not None})

    engine.step(0, Loader(generate_text(2000), 16, 1).micro_batches(0, 6, 0, 1, 3), 0.1, on_gradients_reduced=look)
    return grads


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_frozen_weights_get_no_gradient_under_pipelines(ranks, kind):
    config = with_changes(Config(model=MODEL), data__seq_len=16, train__micro_batches=3, parallel__schedule=kind)
    (expected,) = ranks(gradients_with_frozen_weights, 1, config)
    found = ranks(gradients_with_frozen_weights, 2, with_changes(config, mesh__pp=2))
    assert not any("up_proj" in name for name in expected) and expected.keys() == set().union(*found)
    for grads in found:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-13)


def step_without_tokens(world: World, config: Config) -> tuple:
    groups = bind(world, mesh := config.mesh_of(world.size), group_specs(mesh, config))
    engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, 0)
    batches = Loader(generate_text(2000), 16, 1).micro_batches(0, 5, 0, 1, 3)
    for batch in batches:
        batch.labels.fill_(-100)
    before = [parameter.clone() for parameter in engine.parameters.values()]
    result = engine.step(0, batches, 0.1)
    same = all(torch.equal(a, b) for a, b in zip(before, engine.parameters.values(), strict=True))
    return result.loss, result.update_successful, same, engine.evaluate(batches)


def test_a_step_without_counted_tokens_is_skipped_by_all_stages(ranks):
    config = with_changes(Config(model=MODEL), mesh__pp=2, data__seq_len=16, train__micro_batches=3)
    for loss, applied, same, held_out in ranks(step_without_tokens, 2, config):
        assert loss is None and not applied and same and math.isnan(held_out)


def test_remaining_ranks_become_the_dp_axis():
    assert with_changes(Config(), mesh__pp=2, mesh__tp=2).mesh_of(12) == Mesh(pp=2, dp=3, tp=2)
