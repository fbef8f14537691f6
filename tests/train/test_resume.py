"""A resumed run equals the uninterrupted run: parameters, moments, learning rates, dropout masks and data."""

import contextlib
import json
import re

import pytest
import torch

from minidist.checkpoint.shards import shard_key
from minidist.comm import World
from minidist.config import CheckpointConfig, Config, OptimConfig, PrecisionConfig, TrainConfig
from minidist.errors import UserError
from minidist.tools.cli import parse_train_options
from minidist.tools.config_warnings import describe_learning_rate_jump
from minidist.tools.console import metrics_file
from minidist.tools.console.sample_command import SampleOptions, sample
from minidist.tools.launch.run_folder_guard import open_checked_run_folder
from minidist.train.checkpoint_state import checkpoint_shards
from minidist.train.resume import inherit_options, read_resumed_config
from minidist.train.trainer import Trainer, train
from tests.helpers.small_run import (
    Stop,
    read_checkpoint,
    read_curve,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    with_resume,
    write_text,
)

EXACT = {"optim": OptimConfig(warmup_steps=3), "train__steps": 20, "checkpoint__every": 0}


def differing_names(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path):
    config = small_config(tmp_path / "whole", write_text(tmp_path), **EXACT)
    train_small(World.single(), config, stop_after=5)
    broken = with_changes(config, folder=tmp_path / "broken")
    train_small(World.single(), broken, stop_after=2)
    train_small(World.single(), with_resume(broken, tmp_path / "broken"), stop_after=3)
    assert differing_names(read_checkpoint(tmp_path / "whole", 5), read_checkpoint(tmp_path / "broken", 5)) == []
    assert read_curve(tmp_path / "whole") == read_curve(tmp_path / "broken")


def test_two_ranks_resume_bit_for_bit(ranks, tmp_path):
    config = small_config(
        tmp_path / "run", write_text(tmp_path), optim=OptimConfig(warmup_steps=3), train__eval_every=2
    )
    ranks(train_small, 2, config)
    again = with_resume(config, tmp_path / "run" / "checkpoints" / "step-00000003", folder=tmp_path / "again")
    ranks(train_small, 2, again)
    first, second = read_checkpoint(tmp_path / "run", 6), read_checkpoint(tmp_path / "again", 6)
    assert differing_names(first, second) == []
    assert any(name.startswith("optimizer.exp_avg_sq/") and tensor.any() for name, tensor in first.items())
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "again")
    assert [row["start"] for row in read_metrics(tmp_path / "again") if "start" in row] == [0, 3]


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_of_two_ranks_resumes_on_another_number_of_ranks(ranks, tmp_path, size):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim__momentum=0.9, optim__lr=0.1)
    ranks(train_small, 2, config)
    again = with_resume(config, tmp_path / "run" / "checkpoints" / "step-00000003", folder=tmp_path / "again")
    ranks(train_small, size, again)
    first, second = read_checkpoint(tmp_path / "run", 6), read_checkpoint(tmp_path / "again", 6)
    assert first.keys() == second.keys() and any("momentum" in name for name in first)
    for name, tensor in first.items():
        # Float32 sums of gradients in another order, 1e-6 of the largest, over three steps of SGD.
        assert (tensor - second[name]).abs().max() <= 1e-5 * tensor.abs().max(), name
    # Other data or other masks in one step alone move the parameters by a rate of 0.1 times a gradient: 1e3 tolerances.
    masks = with_changes(again, folder=tmp_path / "masks", model__dropout=0.2)
    ranks(train_small, size, masks)
    moved = read_checkpoint(tmp_path / "masks", 6)
    assert max(((first[n] - moved[n]).abs().max() / first[n].abs().max()).item() for n in first) > 1e-3


def test_metrics_after_the_last_checkpoint_are_written_once(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=2)
    train_small(World.single(), config, stop_after=4)
    file = tmp_path / "run" / "metrics.jsonl"
    with file.open("a") as stream:  # as after a kill in step 5, in the middle of a line
        stream.write(json.dumps({"step": 5, "loss": 0.0}) + '\n{"step": 6, "lo')
    train_small(World.single(), with_resume(config, tmp_path / "run"))
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["loss"] > 0 for row in rows)


FOREIGN = [b"\xff\xfe\0 not ours", b"[1, 2]", b"", b'{"step": "three"}', b'{"step": 1, "time": 5}', b"[" * 100_000]


@pytest.mark.parametrize("is_last_line_complete", [True, False])
def test_foreign_lines_of_the_metrics_file_stay_as_they_are(tmp_path, is_last_line_complete):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    train_small(World.single(), config, stop_after=2)
    file, end = tmp_path / "run" / "metrics.jsonl", b"\n" if is_last_line_complete else b""
    rows = file.read_bytes().split(b"\n")[:-1]
    file.write_bytes(b"\n".join([rows[0], *FOREIGN, *rows[1:], *FOREIGN]) + end)
    train_small(World.single(), with_resume(config, tmp_path / "run"))
    lines = file.read_bytes().split(b"\n")
    assert [line for line in lines[:-1] if line in FOREIGN] == 2 * FOREIGN
    assert [row["step"] for row in metrics_file.read_metrics(file) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_keeps_its_options(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim__lr=0.25)
    train_small(World.single(), config, stop_after=2)
    assert read_resumed_config(tmp_path / "run") == with_resume(config, tmp_path / "run", folder=None)


def test_resuming_an_earlier_checkpoint_needs_a_new_folder(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    train_small(World.single(), config)
    earlier = with_resume(config, tmp_path / "run" / "checkpoints" / "step-00000003")
    for folder in (None, tmp_path / "run"):
        with pytest.raises(UserError, match="is at step 3, and its run has gone on to step 6: resume the latest"):
            train_small(World.single(), with_changes(earlier, folder=folder))
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    train_small(World.single(), with_changes(earlier, folder=tmp_path / "other"))
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_a_resumed_run_writes_to_its_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path / "run", write_text(tmp_path))
    train_small(World.single(), config, stop_after=2)
    assert open_checked_run_folder(with_resume(config, tmp_path / "run", folder=None)).path == tmp_path / "run"
    lone = tmp_path / "step-00000002"  # a checkpoint that lies in no run folder
    (tmp_path / "run" / "checkpoints" / "step-00000002").rename(lone)
    assert str(open_checked_run_folder(with_resume(config, lone, folder=None)).path) == "runs/0001"
    assert str(open_checked_run_folder(with_changes(config, folder=None)).path) == "runs/0002"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hidden_size": 32}, "was trained with --model.hidden-size 16, this run has 32"),
        ({"optim__kind": "adamw"}, "was trained with --optim.kind sgd, this run has adamw"),
        ({"train__seed": 2}, "was trained with --train.seed 1234, this run has 2"),
        ({"data__min_length": 3}, "was trained with --data.min-length none, this run has 3"),
        ({"train__steps": 2}, "is at step 2, and the run ends at step 2: nothing is left to do"),
    ],
)
def test_a_run_that_cannot_resume_raises_the_reason_on_all_ranks(server, tmp_path, changes, message):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    train_small(World.single(), config, stop_after=2)
    options = ((with_resume(config, tmp_path / "run", **changes)),)
    with pytest.raises(UserError) as caught:
        server.run(train_small, 2, options, deadline_s=60)
    assert re.search(message, str(caught.value))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The configuration of a run of three steps, with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"train__steps": 3, "checkpoint__every": 2, "optim": OptimConfig(warmup_steps=2), "optim__lr": 0.01}
    config = small_config(folder / "run", write_text(folder), **changes)
    train_small(World.single(), config)
    return config


@pytest.mark.parametrize(
    ("changes", "was", "now"),
    [
        ({"model__num_heads": 4, "model__num_kv_heads": 2}, "--model.num-heads 2 --model.num-kv-heads 1", "4, 2"),
        ({"model__norm_eps": 1e-3}, "--model.norm-eps 1e-05", "0.001"),
        ({"model__rope_theta": 500.0}, "--model.rope-theta 10000.0", "500.0"),
        ({"model__tie_embeddings": False}, "--model.tie-embeddings true", "false"),
    ],
)
def test_another_model_is_refused_even_if_its_tensors_have_the_same_shapes(run, changes, was, now):
    again = with_resume(run, run.folder, train__steps=9, **changes)
    with pytest.raises(UserError, match=f"was trained with {was}, this run has {now}: it would.* Give {was}, or start"):
        Trainer(World.single(), again)


def test_each_other_option_that_changes_the_run_is_noted_with_both_values(run, tmp_path, capsys):
    changes = {"optim__betas": (0.8, 0.9), "train__global_batch": 6, "data__weights": (2.0,), "train__log_every": 2}
    again = with_resume(run, run.folder, folder=tmp_path / "again", train__steps=4, **changes)
    capsys.readouterr()
    train_small(World.single(), again)
    lines = [line for line in capsys.readouterr().out.splitlines() if "until step" in line]
    assert lines == [
        "--data.weights is 2.0; it was none until step 3",
        "--optim.betas is 0.8 0.9; it was 0.9 0.95 until step 3",
        "--train.steps is 4; it was 3 until step 3",
        "--train.global-batch is 6; it was 12 until step 3",
    ]


def test_a_resume_in_python_takes_the_options_of_the_run_as_the_command_does(run, tmp_path):
    """All options that are not given: the model, too."""
    how = CheckpointConfig(resume=run.folder / "checkpoints" / "step-00000002")
    config = Config(folder=tmp_path / "again", train=TrainConfig(steps=4), checkpoint=how)
    options = ("--folder", str(config.folder), "--train.steps", "4", "--checkpoint.resume", str(how.resume))
    resumed = inherit_options(config)
    assert resumed == parse_train_options(list(options))[0] == inherit_options(resumed)
    assert resumed.model == run.model and resumed.optim == run.optim and resumed.train.steps == 4
    assert train(World.single(), config)["step"] == 4
    default = with_changes(config, checkpoint__inherit=False)
    assert parse_train_options([*options, "--checkpoint.no-inherit"])[0] == inherit_options(default) == default
    with pytest.raises(UserError, match="--model.hidden-size 16 .* this run has 128"):
        Trainer(World.single(), with_changes(default, data__path=run.data.path))


STOCHASTIC = PrecisionConfig("bf16", master="stochastic")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PrecisionConfig("fp64"), PrecisionConfig("fp32")),
        (PrecisionConfig("fp64"), STOCHASTIC),
        (STOCHASTIC, PrecisionConfig("fp32")),
        (STOCHASTIC, PrecisionConfig("fp64")),
        (PrecisionConfig("fp16"), PrecisionConfig("fp64")),
    ],
    ids=lambda precision: precision.master or precision.policy,
)
def test_a_checkpoint_of_any_precision_is_sampled_and_resumed_in_any_other_that_is_asked_for(
    run, tmp_path, capsys, before, after
):
    """Each tensor is rounded once to the dtype of the resumed run."""
    config = with_changes(run, folder=tmp_path / "run", precision=before)
    train_small(World.single(), config)
    assert len(sample(SampleOptions(tmp_path / "run", tokens=3))) >= 4
    again = with_resume(config, tmp_path / "run", folder=tmp_path / "again", precision=after, train__steps=4)
    saved, loaded = read_checkpoint(tmp_path / "run", 3), {}
    with contextlib.closing(Trainer(World.single(), again)) as trainer:
        for shard in checkpoint_shards(trainer.engine):
            loaded[shard_key(shard)] = shard.tensor.detach().clone()
        trainer.run(Stop())
    assert loaded.keys() == saved.keys() and any(saved[name].dtype != tensor.dtype for name, tensor in loaded.items())
    assert all(torch.equal(tensor, saved[name].to(tensor.dtype)) for name, tensor in loaded.items())
    if before.master is None:  # asked for by no option, the dtypes are those of the checkpoint
        options = ["--checkpoint.resume", str(tmp_path / "run"), "--train.steps", "4"]
        assert parse_train_options(options)[0].precision == before


ZERO = {"optim": OptimConfig(warmup_steps=3), "train__steps": 6}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, {"zero__stage": 3}), (2, {"zero__stage": 1})),
        ((2, {"zero__stage": 2}), (1, {})),
        ((1, {}), (4, {"zero__stage": 3})),
    ],
)
def test_any_zero_stage_resumes_from_any_other(ranks, tmp_path, before, after):
    """Masters and moments are saved in global coordinates, so other ranks at another stage continue with equal steps.

    Sums over 1 to 4 ranks in float32 differ in their last bits, and AdamW divides a gradient by its own size.
    """
    (size, how), (other, then) = before, after
    config = small_config(tmp_path / "run", write_text(tmp_path), **ZERO, **how)
    ranks(train_small, size, config)
    source = tmp_path / "run" / "checkpoints" / "step-00000003"
    again = with_changes(with_resume(config, source, folder=tmp_path / "again"), **({"zero__stage": 0} | then))
    ranks(train_small, other, again)
    losses = {
        folder: [row["loss"] for row in read_curve(tmp_path / folder) if "loss" in row][-3:]
        for folder in ("run", "again")
    }
    assert losses["again"] == pytest.approx(losses["run"], rel=1e-4)
    first, second = read_checkpoint(tmp_path / "run", 6), read_checkpoint(tmp_path / "again", 6)
    whole = {re.sub(r"\[.*", "", name) for name in first}
    assert whole == {re.sub(r"\[.*", "", name) for name in second}


def test_an_fp16_run_resumes_with_its_scale_and_masters(ranks, tmp_path):
    precision = PrecisionConfig("fp16", initial_scale=2.0**24, growth_interval=2)
    config = small_config(tmp_path / "run", write_text(tmp_path), precision=precision, **EXACT, zero__stage=1)
    config = with_changes(config, train__steps=10, checkpoint__every=5)
    ranks(train_small, 2, config)
    again = with_resume(config, tmp_path / "run" / "checkpoints" / "step-00000005", folder=tmp_path / "again")
    ranks(train_small, 2, again)
    assert differing_names(read_checkpoint(tmp_path / "run", 10), read_checkpoint(tmp_path / "again", 10)) == []
    scales = [
        [row["loss_scale"] for row in read_metrics(tmp_path / name) if "loss_scale" in row] for name in ("run", "again")
    ]
    assert scales[0] == scales[1] and len(scales[0]) == 10 and len(set(scales[0])) > 2  # the first five are copied
    assert read_curve(tmp_path / "run")[-1] == read_curve(tmp_path / "again")[-1]


def test_an_fp32_run_resumes_from_the_masters_of_a_bf16_run(ranks, tmp_path):
    """A bf16 run saves its masters in float32, so an fp32 run can resume from its checkpoint."""
    config = small_config(tmp_path / "run", write_text(tmp_path), precision=PrecisionConfig("bf16"), **ZERO)
    ranks(train_small, 2, config)
    assert {t.dtype for name, t in read_checkpoint(tmp_path / "run", 3).items() if name.startswith("params/")} == {
        torch.float32
    }
    source = tmp_path / "run" / "checkpoints" / "step-00000003"
    ranks(train_small, 2, with_resume(config, source, folder=tmp_path / "again", precision=PrecisionConfig("fp32")))
    ends = [read_curve(tmp_path / name)[-1]["held_out_loss"] for name in ("run", "again")]
    assert ends[0] == pytest.approx(ends[1], rel=2**-8)  # an eps of bfloat16


def test_a_jump_of_the_learning_rate_is_reported(tmp_path, capsys):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim=OptimConfig(warmup_steps=1), train__steps=8)
    train_small(World.single(), config, stop_after=4)
    again = with_resume(config, tmp_path / "run")
    train_small(World.single(), with_changes(again, folder=tmp_path / "same"), stop_after=1)
    assert "learning rate of step" not in capsys.readouterr().out
    longer = with_changes(again, folder=tmp_path / "longer", train__steps=80)
    note = describe_learning_rate_jump(config, longer, 4)
    assert re.match(r"learning rate of step 5: 2.99e-03 by .* this run \(cosine over 80 steps\); by that of the", note)
    assert "(cosine over 8 steps) it would be" in note
    train_small(World.single(), longer, stop_after=1)
    assert note in capsys.readouterr().out
