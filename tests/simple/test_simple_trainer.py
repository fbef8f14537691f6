"""A whole run of the simple trainer: its losses are those of the fast one, and a resumed run is the same run."""

import pytest

from minidist.comm import World
from minidist.config import CheckpointConfig, MeshConfig
from minidist.errors import DamagedError
from minidist.simple.recovery import replicated_tensors, tensor_digest
from minidist.simple.trainer import Trainer
from tests.helpers.small_run import read_curve, small_config, train_small, with_changes, write_text


def train_simple(world, config, steps=None):
    """Train, at most to step `steps`; return each step's number, loss, norm and tokens, and the summary."""
    rows = []
    trainer = Trainer(world, config)
    step = trainer.step

    def recorded_step():
        decision = step()
        rows.append((trainer.progress.step, decision.loss, decision.grad_norm, decision.num_tokens))
        return decision

    trainer.step = recorded_step
    if steps is not None:
        trainer.is_stop_requested = lambda: trainer.progress.step + 1 >= steps
    return rows, trainer.run()


def config_of(tmp_path, name, **changes):
    return small_config(tmp_path / name, write_text(tmp_path), precision__policy="fp64", **changes)


LAYOUTS = {
    "one rank": ({}, {}),
    "dp2 zero2": ({"dp": 2}, {"zero__stage": 2}),
    "tp2": ({"tp": 2}, {"model__num_kv_heads": 2}),
    "cp2": ({"cp": 2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_has_the_losses_of_the_fast_engine(ranks, tmp_path, layout):
    mesh, changes = LAYOUTS[layout]
    config = config_of(tmp_path, "simple", mesh=MeshConfig(**mesh), **changes)
    size = 2 if mesh else 1
    found = ranks(train_simple, size, config)[0]
    train_small(World.single(), with_changes(config, folder=tmp_path / "fast", mesh=MeshConfig(), zero__stage=0))
    rows = {row["step"]: row for row in read_curve(tmp_path / "fast") if "loss" in row}
    for step, loss, norm, num_tokens in found[0]:
        assert num_tokens == config.train.global_batch * config.data.seq_len, step
        assert loss == pytest.approx(rows[step]["loss"], rel=1e-10), step
        assert norm == pytest.approx(rows[step]["grad_norm"], rel=1e-10), step
    assert len(found[0]) == len(rows)


def test_a_run_goes_on_in_another_layout_as_if_it_had_not_stopped(ranks, tmp_path):
    whole, summary = train_simple(World.single(), config_of(tmp_path, "whole"))
    config = config_of(tmp_path, "stopped", mesh=MeshConfig(dp=2), zero__stage=3)
    first, stopped = ranks(train_simple, 2, config, 4)[0]
    assert stopped["stopped"] and stopped["step"] == 4
    rest, resumed = train_simple(World.single(), config_of(tmp_path, "stopped"))
    assert [step for step, *_ in first + rest] == [step for step, *_ in whole]
    for (step, loss, norm, _), (_, right_loss, right_norm, _) in zip(first + rest, whole, strict=True):
        assert (loss, norm) == pytest.approx((right_loss, right_norm), rel=1e-10), step
    assert resumed["held_out_loss"] == pytest.approx(summary["held_out_loss"], rel=1e-10)


@pytest.mark.parametrize("first", ["simple", "fast"])
def test_each_engine_goes_on_from_the_others_checkpoint(tmp_path, first):
    config = config_of(tmp_path, "both", optim__kind="adamw", optim__lr=1e-2)
    half = with_changes(config, train__steps=3, optim__schedule="constant")
    config = with_changes(config, optim__schedule="constant")
    _, whole = train_simple(World.single(), with_changes(config, folder=tmp_path / "constant"))
    resume = CheckpointConfig(every=3, resume=tmp_path / "both")
    if first == "simple":
        train_simple(World.single(), half)
        summary = train_small(World.single(), with_changes(config, checkpoint=resume))
    else:
        train_small(World.single(), half)
        _, summary = train_simple(World.single(), config)
    assert summary["held_out_loss"] == pytest.approx(whole["held_out_loss"], rel=1e-10)


# What a resumed run would lose unnoticed in its first steps: mesh, changes of the configuration.
RESUMED = {
    "diloco": ({"dp": 2}, {"consistency__mode": "diloco", "consistency__h": 2, "consistency__outer_momentum": 0.5}),
    "fp16": ({}, {"precision__policy": "fp16", "precision__growth_interval": 3, "precision__initial_scale": 64.0}),
}


class Notes:
    def __init__(self):
        self.lines = []

    def on_note(self, line):
        self.lines.append(line)


def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_ones(tmp_path):
    config, notes = small_config(tmp_path / "run", write_text(tmp_path)), Notes()
    trainer = Trainer(World.single(), config)
    for _ in range(3):
        trainer.step()
        trainer.save()
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000003" / "checkpoint.json").write_text("nothing")
    (checkpoints / "step-00000002" / "rank-00000.safetensors").unlink()
    trainer = Trainer(World.single(), config, [notes])
    assert (trainer.progress.step, trainer.resumed_from) == (1, checkpoints / "step-00000001")
    assert ["step-0000000" + number in line for number, line in zip("32", notes.lines, strict=True)] == [True, True]
    (checkpoints / "step-00000001" / "checkpoint.json").unlink()
    with pytest.raises(DamagedError, match="step-00000001"):
        Trainer(World.single(), config)


def train_whole_and_in_two_parts(world, whole, parted):
    """Return the rows, and digests of the state at the end, of a run and of one that stops after step 4 and goes on."""
    found = []
    for configs in ([whole], [parted, parted]):
        rows = []
        for part, config in enumerate(configs, start=1):
            trainer = Trainer(world, config)
            is_last = part == len(configs)
            while trainer.progress.step < (config.train.steps if is_last else 4):
                decision = trainer.step()
                rows.append((trainer.progress.step, decision.loss, decision.grad_norm))
            if not is_last:
                trainer.save()
        digests = {name: tensor_digest(tensor) for name, (tensor, _) in replicated_tensors(trainer).items()}
        found.append((rows, digests, trainer.engine.scaler and trainer.engine.scaler.state_dict()))
    return found


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_is_the_same_run_bit_for_bit(ranks, tmp_path, kind):
    mesh, changes = RESUMED[kind]
    config = small_config(tmp_path / "whole", write_text(tmp_path), mesh=MeshConfig(**mesh), **changes)
    parted = with_changes(config, folder=tmp_path / "parted")
    for whole, resumed in ranks(train_whole_and_in_two_parts, mesh.get("dp", 1), config, parted):
        assert resumed == whole
