"""A run that was interrupted and resumed is the run that was not: parameters, moments, rates, masks and data."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from minidist.comm import World
from minidist.config import OptimConfig, PrecisionConfig
from minidist.errors import UserError
from minidist.train.resume import describe_learning_rate_jump, resumed_config
from minidist.train.run_folder import claim
from tests.helpers.small_run import changed, curve_of, resuming, rows_of, run, small_config, write_text

EXACT = {"optim": OptimConfig(warmup_steps=3), "train__steps": 20, "checkpoint__every": 0}


def tensors_of(folder, step):
    """What a checkpoint holds, from all its files."""
    files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    config = small_config(tmp_path / "whole", write_text(tmp_path), **EXACT)
    run(World.single(), config, stop_after=5)
    broken = changed(config, folder=tmp_path / "broken")
    run(World.single(), broken, stop_after=2)
    run(World.single(), resuming(broken, tmp_path / "broken"), stop_after=3)
    assert differing(tensors_of(tmp_path / "whole", 5), tensors_of(tmp_path / "broken", 5)) == []
    assert curve_of(tmp_path / "whole") == curve_of(tmp_path / "broken")


def test_two_ranks_go_on_bit_for_bit(ranks, tmp_path):
    config = small_config(
        tmp_path / "run", write_text(tmp_path), optim=OptimConfig(warmup_steps=3), train__eval_every=2
    )
    ranks(run, 2, config)
    again = resuming(config, tmp_path / "run" / "checkpoints" / "step-00000003", folder=tmp_path / "again")
    ranks(run, 2, again)
    first, second = tensors_of(tmp_path / "run", 6), tensors_of(tmp_path / "again", 6)
    assert differing(first, second) == []
    assert any(name.startswith("optimizer.exp_avg_sq/") and tensor.any() for name, tensor in first.items())
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "again")
    assert [row["start"] for row in rows_of(tmp_path / "again") if "start" in row] == [0, 3]


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_of_two_ranks_goes_on_with_another_number(ranks, tmp_path, size):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim__momentum=0.9, optim__lr=0.1)
    ranks(run, 2, config)
    again = resuming(config, tmp_path / "run" / "checkpoints" / "step-00000003", folder=tmp_path / "again")
    ranks(run, size, again)
    first, second = tensors_of(tmp_path / "run", 6), tensors_of(tmp_path / "again", 6)
    assert first.keys() == second.keys() and any("momentum" in name for name in first)
    for name, tensor in first.items():
        # Float32 sums of gradients in another order, 1e-6 of the largest (FACTS), over three steps of SGD.
        assert (tensor - second[name]).abs().max() <= 1e-5 * tensor.abs().max(), name
    # Other data or other masks in one step alone move the parameters by a rate of 0.1 times a gradient: 1e3 tolerances.
    masks = changed(again, folder=tmp_path / "masks", model__dropout=0.2)
    ranks(run, size, masks)
    moved = tensors_of(tmp_path / "masks", 6)
    assert max(((first[n] - moved[n]).abs().max() / first[n].abs().max()).item() for n in first) > 1e-3


def test_lines_written_after_the_last_checkpoint_are_written_once(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=2)
    run(World.single(), config, stop_after=4)
    file = tmp_path / "run" / "metrics.jsonl"
    with file.open("a") as stream:  # as after a kill in step 5, in the middle of a line
        stream.write(json.dumps({"step": 5, "loss": 0.0}) + '\n{"step": 6, "lo')
    run(World.single(), resuming(config, tmp_path / "run"))
    steps = [row["step"] for row in rows_of(tmp_path / "run") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert rows_of(tmp_path / "run")[-2]["loss"] > 0


def test_a_resumed_run_keeps_the_options_it_began_with(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim__lr=0.25)
    run(World.single(), config, stop_after=2)
    assert resumed_config(tmp_path / "run") == resuming(config, tmp_path / "run", folder=None)


def test_going_back_needs_a_folder_of_its_own(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    run(World.single(), config)
    earlier = resuming(config, tmp_path / "run" / "checkpoints" / "step-00000003")
    for folder in (None, tmp_path / "run"):
        with pytest.raises(UserError, match="is at step 3, and its run has gone on to step 6: resume the latest"):
            run(World.single(), changed(earlier, folder=folder))
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    run(World.single(), changed(earlier, folder=tmp_path / "other"))
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_a_resumed_run_writes_where_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path / "run", write_text(tmp_path))
    run(World.single(), config, stop_after=2)
    assert claim(resuming(config, tmp_path / "run", folder=None)) == tmp_path / "run"
    lone = tmp_path / "step-00000002"  # a checkpoint that lies in no run folder
    (tmp_path / "run" / "checkpoints" / "step-00000002").rename(lone)
    assert str(claim(resuming(config, lone, folder=None))) == "runs/0001"
    assert str(claim(changed(config, folder=None))) == "runs/0002"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hidden_size": 32}, r"does not fit this run:\n.* has shape \(\d+,.*\) in the checkpoint, \(\d+"),
        ({"optim__kind": "adamw"}, "was trained with --optim.kind sgd, this run has adamw"),
        ({"train__seed": 2}, "was trained with --train.seed 1234, this run has 2"),
        ({"data__min_length": 3}, "was trained with --data.min-length None, this run has 3"),
        ({"train__steps": 2}, "is at step 2, and the run ends at step 2: nothing is left to do"),
    ],
)
def test_a_run_that_cannot_go_on_is_reported_why_on_all_ranks(server, tmp_path, changes, message):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    run(World.single(), config, stop_after=2)
    options = ((resuming(config, tmp_path / "run", **changes)),)
    with pytest.raises(UserError) as caught:
        server.run(run, 2, options, deadline_s=60)
    assert re.search(message, str(caught.value))


ZERO = {"optim": OptimConfig(warmup_steps=3), "train__steps": 6}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, {"zero__stage": 3}), (2, {"zero__stage": 1})),
        ((2, {"zero__stage": 2}), (1, {})),
        ((1, {}), (4, {"zero__stage": 3})),
    ],
)
def test_any_stage_goes_on_from_any_other(ranks, tmp_path, before, after):
    """Masters and moments are in global coordinates: other ranks, at another stage, have the same steps to come.

    Sums over 1 to 4 ranks in float32 differ in their last bits, and AdamW divides a gradient by its own size.
    """
    (size, how), (other, then) = before, after
    config = small_config(tmp_path / "run", write_text(tmp_path), **ZERO, **how)
    ranks(run, size, config)
    source = tmp_path / "run" / "checkpoints" / "step-00000003"
    again = changed(resuming(config, source, folder=tmp_path / "again"), **({"zero__stage": 0} | then))
    ranks(run, other, again)
    losses = {
        folder: [row["loss"] for row in curve_of(tmp_path / folder) if "loss" in row][-3:]
        for folder in ("run", "again")
    }
    assert losses["again"] == pytest.approx(losses["run"], rel=1e-4)
    first, second = tensors_of(tmp_path / "run", 6), tensors_of(tmp_path / "again", 6)
    whole = {re.sub(r"\[.*", "", name) for name in first}
    assert whole == {re.sub(r"\[.*", "", name) for name in second}


def test_a_scaled_run_goes_on_with_its_scale_and_its_masters(ranks, tmp_path):
    precision = PrecisionConfig("fp16", initial_scale=2.0**24, growth_interval=2)
    config = small_config(tmp_path / "run", write_text(tmp_path), precision=precision, **EXACT, zero__stage=1)
    config = changed(config, train__steps=10, checkpoint__every=5)
    ranks(run, 2, config)
    again = resuming(config, tmp_path / "run" / "checkpoints" / "step-00000005", folder=tmp_path / "again")
    ranks(run, 2, again)
    assert differing(tensors_of(tmp_path / "run", 10), tensors_of(tmp_path / "again", 10)) == []
    scales = [
        [row["loss_scale"] for row in rows_of(tmp_path / name) if "loss_scale" in row] for name in ("run", "again")
    ]
    assert scales[0] == scales[1] and len(scales[0]) == 10 and len(set(scales[0])) > 2  # the first five are copied
    assert curve_of(tmp_path / "run")[-1] == curve_of(tmp_path / "again")[-1]


def test_masters_make_a_checkpoint_of_one_format_the_start_of_another(ranks, tmp_path):
    """A bf16 run keeps its masters in float32, and so does its checkpoint: fp32 goes on from it, and back."""
    config = small_config(tmp_path / "run", write_text(tmp_path), precision=PrecisionConfig("bf16"), **ZERO)
    ranks(run, 2, config)
    assert {t.dtype for name, t in tensors_of(tmp_path / "run", 3).items() if name.startswith("params/")} == {
        torch.float32
    }
    source = tmp_path / "run" / "checkpoints" / "step-00000003"
    ranks(run, 2, resuming(config, source, folder=tmp_path / "again", precision=PrecisionConfig("fp32")))
    ends = [curve_of(tmp_path / name)[-1]["held_out_loss"] for name in ("run", "again")]
    assert ends[0] == pytest.approx(ends[1], rel=2**-8)  # an eps of bfloat16


def test_a_jump_of_the_learning_rate_is_noted(tmp_path, capsys):
    config = small_config(tmp_path / "run", write_text(tmp_path), optim=OptimConfig(warmup_steps=1), train__steps=8)
    run(World.single(), config, stop_after=4)
    again = resuming(config, tmp_path / "run")
    run(World.single(), changed(again, folder=tmp_path / "same"), stop_after=1)
    assert "learning rate of step" not in capsys.readouterr().out
    longer = changed(again, folder=tmp_path / "longer", train__steps=80)
    note = describe_learning_rate_jump(config, longer, 4)
    assert re.match(r"learning rate of step 5: 2.99e-03 by .* this run \(cosine over 80 steps\); by that of the", note)
    assert "(cosine over 8 steps) it would be" in note
    run(World.single(), longer, stop_after=1)
    assert note in capsys.readouterr().out
