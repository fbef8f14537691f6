"""`minidist train --engine simple`: the same log, metrics, run folder, checkpoints and refusals as the fast engine."""

import copy
import dataclasses
import json
import os
import signal

import pytest
import torch

from minidist.comm import Meter, World, bind
from minidist.config import CheckpointConfig, MeshConfig
from minidist.errors import RunError, UserError
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.simple.engine import Engine
from minidist.simple.parallelize import group_specs, parallelize
from minidist.tools.console.next_token_logits import next_token_logits_of_simple_engine
from minidist.tools.console.reporter import RunReporter
from minidist.tools.estimate.estimate import estimate
from minidist.tools.launch.run import train_and_report
from minidist.tools.launch.simple_engine import train_simple
from minidist.train.observer import Observer
from minidist.validation import validate
from tests.helpers.small_run import small_config, with_changes, write_text

LAYOUTS = {
    "dp2 x tp2, sequence parallel, zero1": (
        {"dp": 2, "tp": 2},
        {"parallel__sequence": True, "zero__stage": 1, "model__num_kv_heads": 2},
    ),
    "pp2 x dp2, zero3": ({"pp": 2, "dp": 2}, {"model__num_layers": 2, "zero__stage": 3}),
    "two replicas of cp2, diloco": (
        {"dp": 2, "cp": 2},
        {"consistency__mode": "diloco", "consistency__h": 2, "consistency__outer_momentum": 0.5},
    ),
}


def config_of(tmp_path, name, mesh, **changes):
    config = small_config(tmp_path / name, write_text(tmp_path), precision__policy="fp64", **changes)
    return with_changes(config, mesh=MeshConfig(**mesh), train__sample_tokens=4, train__eval_every=3)


def rows_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "step" in row]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_engines_write_the_same_run_folder(ranks, tmp_path, capsys, layout):
    mesh, changes = LAYOUTS[layout]
    config = config_of(tmp_path, "fast", mesh, **changes)
    fast = ranks(train_and_report, 4, config)[0]
    simple = ranks(train_and_report, 4, with_changes(config, engine="simple", folder=tmp_path / "simple"))[0]
    assert simple.keys() == fast.keys() and simple["step"] == 6 and not simple["stopped"]
    assert simple["held_out_loss"] == pytest.approx(fast["held_out_loss"], rel=1e-10)
    files = {path.name for path in (tmp_path / "fast").iterdir()}
    assert {path.name for path in (tmp_path / "simple").iterdir()} == files
    saved = [path.name for path in sorted((tmp_path / "simple" / "checkpoints").iterdir())]
    assert saved == ["step-00000003", "step-00000006"]
    for mine, other in zip(rows_of(tmp_path / "simple"), rows_of(tmp_path / "fast"), strict=True):
        assert mine.keys() == other.keys()
        for key in {"step", "loss", "grad_norm", "lr", "held_out_loss"} & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-10), (mine["step"], key)


def logits_of(world, config):
    """The next-token logits of two prompts: by the simple engine's sharded model, and by the unsplit one."""
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config))
    model = Transformer(config.model).double()
    init_parameters(model, 7)
    tokens = torch.arange(10).view(2, 5)
    expected = copy.deepcopy(model).eval()(tokens)[:, -1]
    engine = Engine(parallelize(model, groups, config), groups, config)
    engine.model.eval()
    return next_token_logits_of_simple_engine(engine, tokens).tolist(), expected.tolist()


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"pp": 2, "tp": 2}, {"parallel__sequence": True, "zero__stage": 3}),  # 5 tokens are padded to 6
        ({"cp": 2, "dp": 2}, {"zero__stage": 3}),
    ],
)
def test_a_sharded_model_has_the_logits_of_one_process(ranks, tmp_path, mesh, changes):
    config = config_of(tmp_path, "run", mesh, model__num_layers=2, model__num_kv_heads=2, engine="simple", **changes)
    for found, expected in ranks(logits_of, 4, config):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-12, atol=1e-12)


def stop_after_two_steps(world, config):
    """Train until this process sends itself SIGTERM in the second step."""

    class Stop(Observer):
        def before_step(self, trainer):
            if trainer.progress.step == 1 and trainer.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    return train_simple(world, config, [Stop(), RunReporter()], Meter(keep=False))


def test_a_signal_to_one_rank_stops_all_after_the_step_and_the_run_goes_on(ranks, tmp_path):
    config = config_of(tmp_path, "run", {"dp": 2}, engine="simple")
    for rank, summary in enumerate(ranks(stop_after_two_steps, 2, config)):
        assert (summary["step"], summary["stopped"]) == (2, True)
        assert summary["stop_signal"] == ("SIGTERM" if rank == 1 else None)
    changed = with_changes(config, optim__lr=0.25, checkpoint=CheckpointConfig(resume=tmp_path / "run", inherit=False))
    summary = train_and_report(World.single(), with_changes(changed, mesh=MeshConfig()))
    assert summary["step"] == 6 and not summary["stopped"]
    assert [row["step"] for row in rows_of(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def stop_one_replica(world, config):
    """Train; before step 3 one of two replicas is asked to stop. Return the summary."""

    class Stop(Observer):
        def before_step(self, trainer):
            if trainer.progress.step == 2 and trainer.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    return train_simple(world, config, [Stop()], Meter(keep=False))


def test_a_signal_to_one_replica_stops_all_after_the_next_merge(ranks, tmp_path):
    modes = {"consistency__mode": "local", "consistency__h": 2}
    config = config_of(tmp_path, "run", {"dp": 2}, engine="simple", **modes)
    # Step 3 evaluates, and only one replica knows of the signal.
    summaries = ranks(stop_one_replica, 2, config)
    assert [(summary["step"], summary["stopped"]) for summary in summaries] == [(4, True)] * 2


def test_a_replica_that_never_trained_goes_on_from_a_checkpoint(ranks, tmp_path):
    """Its optimizer has no states."""
    modes = {"consistency__mode": "local", "consistency__h": 3, "data__weights": (1.0, 0.0), "optim__kind": "adamw"}
    whole = config_of(tmp_path, "whole", {"dp": 2}, engine="simple", optim__schedule="constant", **modes)
    half = with_changes(whole, folder=tmp_path / "half", train__steps=3)
    ranks(train_and_report, 2, half)
    rest = with_changes(half, train__steps=6, checkpoint=CheckpointConfig(resume=tmp_path / "half", inherit=False))
    losses = [ranks(train_and_report, 2, config)[0]["held_out_loss"] for config in (whole, rest)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_changed_options_are_told_and_impossible_ones_refused(ranks, tmp_path, capsys):
    config = config_of(tmp_path, "run", {}, engine="simple")
    train_and_report(World.single(), config)
    capsys.readouterr()
    resume = CheckpointConfig(resume=tmp_path / "run", inherit=False)
    longer = with_changes(config, checkpoint=resume, train__steps=8, optim__momentum=0.5)
    train_and_report(World.single(), longer)
    assert "--optim.momentum is 0.5; it was 0.0 until step 6" in capsys.readouterr().out
    for changes, message in (
        ({"model__rope_theta": 500.0}, "was trained with --model.rope-theta"),
        ({"precision__policy": "fp32"}, "the simple engine converts no dtypes: give --engine fast"),
        ({"data__path": write_text(tmp_path, seed=1)}, "was trained on another corpus"),
    ):
        with pytest.raises(UserError, match=message):
            train_and_report(World.single(), with_changes(longer, train__steps=9, **changes))


REFUSED = {
    "--parallel.schedule 1f1b or gpipe": {"mesh__pp": 2, "parallel__schedule": "interleaved"},
    "--parallel.schedule 1f1b": {"mesh__pp": 2, "parallel__schedule": "zb-h1", "recompute": "block"},
    "--optim.kind adamw or sgd": {"optim__kind": "muon"},
    "--no-compile": {"compile": True},
    "--recompute block": {"recompute": "selective"},
    "--precision.policy alone": {"precision__policy": "bf16", "precision__reduce": "bf16"},
    "no --precision.loss-scale": {"precision__policy": "bf16", "precision__loss_scale": "dynamic"},
    "no --zero.shard": {"zero__stage": 1, "zero__shard": 1},
    "--zero.no-keep-gradients": {"zero__stage": 2, "zero__keep_gradients": True},
    "--zero.no-offload": {"zero__stage": 1, "zero__offload": True, "device": "cuda"},
    "--consistency.mode synchronous, local or diloco": {"consistency__mode": "central"},
    "--consistency.exchange full": {
        "consistency__mode": "diloco",
        "consistency__h": 2,
        "consistency__exchange": "int8",
    },
    "--consistency.fragments 1": {"consistency__mode": "diloco", "consistency__h": 2, "consistency__fragments": 2},
    "--consistency.no-reset-moments": {
        "consistency__mode": "local",
        "consistency__h": 2,
        "consistency__reset_moments": True,
    },
    "--fault.no-live-recovery": {"fault__live_recovery": True},
    'no --fault.inject, or one like "flip rank 1 at step 3 in gather"': {
        "fault__inject": "kill rank 1 at step 3 in update"
    },
    "--fault.digest-every 0": {"consistency__mode": "local", "consistency__h": 2, "fault__digest_every": 2},
    "--train.max-skipped-steps 0": {"train__max_skipped_steps": 2},
    "--checkpoint.keep-every 0": {"checkpoint__keep_every": 2},
    "no --memory": {"memory__file": "memory.png"},
    "no --trace": {"trace__file": "trace.json"},
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_the_simple_engine_leaves_out_is_refused_in_one_sentence(tmp_path, change):
    config = small_config(
        tmp_path / "run", write_text(tmp_path), engine="simple", model__num_layers=4, **REFUSED[change]
    )
    fast = dataclasses.replace(config, engine="fast")
    validate(fast, 2)
    with pytest.raises(UserError) as caught:
        validate(config, 2)
    assert str(caught.value).startswith("engine is simple, which cannot run ")
    assert str(caught.value).endswith(f": give {change}, or --engine fast.")


@pytest.mark.parametrize("mode", ["central", "asynchronous", "stale"])
def test_servers_are_refused_with_the_place_where_they_train(tmp_path, mode):
    config = small_config(tmp_path / "run", write_text(tmp_path), engine="simple", consistency__mode=mode)
    with pytest.raises(UserError, match=f"cannot run consistency.mode {mode} .*tools/consistency/virtual_run.py"):
        validate(config, 2)


def flip_a_bit(world, config):
    """Train; before the third step change the lowest bit of one element of rank 1's parameters. Return the summary."""

    class Flip(Observer):
        def __init__(self):
            self.notes = []

        def before_step(self, trainer):
            if trainer.progress.step == 2 and trainer.world.rank == 1:
                value = trainer.engine.reducer.masters["model.norm.weight"].data
                value[0] = torch.nextafter(value[0], 2 * value[0])

        def on_note(self, line):
            self.notes.append(line)

    flip = Flip()
    return train_simple(world, config, [flip], Meter(keep=False)), flip.notes


def test_replicas_that_differ_are_found_and_repaired(ranks, tmp_path):
    config = config_of(tmp_path, "right", {"dp": 3}, engine="simple")
    right = ranks(train_and_report, 3, config)[0]
    config = with_changes(config, folder=tmp_path / "wrong", fault__digest_every=1)
    found = r"step 3: the replicas of params/model\.norm\.weight differ, on rank 1\."
    with pytest.raises(RunError, match=found + " Go on from the last checkpoint"):
        ranks(flip_a_bit, 3, config)
    config = with_changes(config, folder=tmp_path / "repaired", fault__repair=True, train__eval_every=0)
    summary, notes = ranks(flip_a_bit, 3, config)[0]
    assert [note for note in notes if "differ" in note] == [notes[0]] and notes[0].endswith("Repaired from the others.")
    assert summary["held_out_loss"] == pytest.approx(right["held_out_loss"], rel=1e-12)


def test_estimates_refuse_the_simple_engine(tmp_path):
    with pytest.raises(UserError, match="engine is simple, which has no estimate: give --engine fast"):
        estimate(small_config(tmp_path / "run", write_text(tmp_path), engine="simple"), 2)
