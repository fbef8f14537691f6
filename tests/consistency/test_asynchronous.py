"""Asynchronous workers and bounded staleness on live ranks: equalities, stop and resume, bytes, and bad input."""

import json

import pytest
import torch

from minidist.config import OptimConfig
from minidist.errors import RunError, UserError
from minidist.tools.config_warnings import validate_options
from minidist.tools.deadlock.detector import find_awaited_ranks
from minidist.tools.estimate.estimate import estimate
from minidist.train.trainer import Trainer
from tests.helpers.consistency_runs import ADAMW, WEIGHTED, assert_equal_parameters, make_config, train
from tests.helpers.small_run import (
    Stop,
    read_checkpoint,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    with_resume,
    write_text,
)

ASYNCHRONOUS = {"consistency__mode": "asynchronous"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("mode", ["asynchronous", "stale"])
def test_one_worker_is_one_process(ranks, tmp_path, text, mode):
    """With AdamW, clipping and dropout; and so is the rest of the run after a resume."""
    expected = train(ranks, 1, make_config(tmp_path / "one", text, optim=ADAMW))
    config = make_config(tmp_path / mode, text, optim=ADAMW, consistency__mode=mode)
    assert_equal_parameters(train(ranks, 1, config), expected)
    again = with_resume(config, config.folder / "checkpoints" / "step-00000004", folder=tmp_path / "again")
    assert_equal_parameters(train(ranks, 1, again), expected)


@pytest.mark.parametrize("root, more", [(0, {}), (2, WEIGHTED)], ids=["even", "weighted"])
def test_staleness_bound_0_is_synchronous_training(ranks, tmp_path, text, root, more):
    """With plain SGD; also after a resume, when the server counts the updates of the steps before."""
    expected = train(ranks, 3, make_config(tmp_path / "synchronous", text, **more))
    stale = {"consistency__mode": "stale", "consistency__staleness_bound": 0, "consistency__server": root}
    config = make_config(tmp_path / "stale", text, **more, **stale)
    assert_equal_parameters(train(ranks, 3, config), expected)
    again = with_resume(config, config.folder / "checkpoints" / "step-00000002", folder=tmp_path / "again")
    assert_equal_parameters(train(ranks, 3, again), expected)


def test_staleness_is_bounded_and_counted(ranks, tmp_path, text):
    """Between a pull and its push, each of the 2 other workers pushes at most 2 * bound + 1 times."""
    how = {"consistency__mode": "stale", "consistency__staleness_bound": 1, "checkpoint__every": 0}
    [summary, *_] = ranks(train_small, 3, make_config(tmp_path / "run", text, train__steps=20, **how))
    assert sum(summary["staleness"].values()) == 60 and max(summary["staleness"]) <= 6
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["staleness"] == {str(key): count for key, count in summary["staleness"].items()}


def test_the_checkpoint_is_that_of_one_process(ranks, tmp_path, text):
    """Other numbers of workers resume from it."""
    config = make_config(tmp_path / "run", text, optim=ADAMW, **ASYNCHRONOUS)
    ranks(train_small, 3, config)
    one = train(ranks, 1, make_config(tmp_path / "one", text, optim=ADAMW, **ASYNCHRONOUS))
    names = read_checkpoint(config.folder, 6).keys()
    assert names == read_checkpoint(tmp_path / "one", 6).keys() and {f"params/{n}" for n in one} <= {
        name.split("[")[0] for name in names
    }
    again = with_resume(config, config.folder / "checkpoints" / "step-00000004", folder=tmp_path / "again")
    assert [summary["step"] for summary in ranks(train_small, 2, again)] == [6, 6]


def train_until_stop(world, config, stopped_rank):
    return train_small(world, config, 2 if world.rank == stopped_rank else None)


@pytest.mark.parametrize("stopped_rank", [0, 1])
def test_a_stop_of_one_rank_ends_the_run_on_all_ranks_after_the_same_step(ranks, tmp_path, text, stopped_rank):
    """Rank 0, the server, has most of the work, so the others are ahead of it."""
    how = ASYNCHRONOUS | {"checkpoint__every": 0, "data__shares": (10.0, 1.0, 1.0), "train__steps": 1000}
    config = make_config(tmp_path / "run", text, **how)
    summaries = ranks(train_until_stop, 3, config, stopped_rank)
    [step] = {summary["step"] for summary in summaries}
    assert 2 <= step < 1000 and summaries[0]["stopped"]
    assert (config.folder / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.parametrize("mode", ["asynchronous", "local"])
def test_a_gradient_that_is_not_finite_ends_the_run_while_a_checkpoint_is_saved(ranks, tmp_path, text, mode):
    """In step 3 of one replica, which alone knows; the checkpoint of step 2 is not complete before all ranks meet."""
    how = {"consistency__mode": mode, "fault__inject": "nan rank 1 at step 3 in backward"}
    config = make_config(tmp_path / "run", text, checkpoint__every=2, **how)
    config = with_changes(config, consistency__h=6) if mode == "local" else config
    with pytest.raises(RunError, match="step 3: the reduced gradient is not finite"):
        ranks(train_small, 3, config)


@pytest.mark.process_lifecycle  # the run ends two seconds after the rank has stopped: a late look finds it ended
@pytest.mark.parametrize("mode", ["asynchronous", "stale"])
def test_only_the_rank_that_hangs_is_awaited(server, tmp_path, text, mode):
    """A worker that is stopped: neither the server, for whom the others wait, nor nobody."""
    how = {"consistency__mode": mode, "fault__inject": "stop rank 1 at step 3 in forward", "checkpoint__every": 0}
    job = server.start(train_small, 3, (make_config(tmp_path / "run", text, **how),), deadline_s=60)
    waiting, awaited, waiting_for_1 = [], {}, set()
    while not (len(waiting) == 2 and awaited.keys() == {1} and 0 in waiting_for_1):
        assert not job.poll(0.05), "the run ended"
        statuses = {rank: status for rank, status in enumerate(job.status_snapshots()) if status is not None}
        waiting = [rank for rank, status in statuses.items() if status.state == "waiting"]
        awaited = find_awaited_ranks(statuses)
        waiting_for_1 = {rank for ranks in awaited.get(1, {}).values() for rank in ranks}
    assert waiting == [0, 2]
    job.kill()


@pytest.mark.parametrize("mode", ["central", "asynchronous"])
def test_a_bit_flips_on_a_rank_without_masters(ranks, tmp_path, text, mode):
    how = {"consistency__mode": mode, "fault__inject": "flip rank 1 at step 3 in forward"}
    assert [summary["step"] for summary in ranks(train_small, 2, make_config(tmp_path / mode, text, **how))] == [6, 6]


def test_a_reduced_gradient_is_made_nan_only_where_there_is_one():
    config = small_config(None, None, consistency__mode="central", fault__inject="nan rank 1 at step 3 in agree")
    with pytest.raises(UserError, match="only the server, rank 0, has it: name rank 0, or the phase backward"):
        validate_options(config, 2)
    validate_options(with_changes(config, consistency__server=1), 2)


@pytest.mark.parametrize("mode", ["asynchronous", "local"])
def test_steps_of_the_others_are_useful_while_rank_0_has_no_samples(ranks, tmp_path, text, mode):
    how = {"consistency__mode": mode, "data__shares": (0.0, 1.0), "consistency__h": 3}
    config = make_config(tmp_path / "run", text, **how)
    assert ranks(train_small, 2, config)[0]["goodput"] > 0
    assert "skipped steps" not in read_metrics(config.folder)[-1]["time"]["lost"]


def test_training_lowers_the_loss(ranks, tmp_path, text):
    optim = OptimConfig(kind="sgd", lr=0.5, weight_decay=0.0, warmup_steps=2)
    config = make_config(tmp_path / "run", text, optim=optim, train__steps=60, checkpoint__every=0, **ASYNCHRONOUS)
    [summary, *_] = ranks(train_small, 3, config)
    assert summary["held_out_loss"] < 0.7 * torch.tensor(256.0).log()


def sent_bytes(world, config):
    """The bytes that this rank sends among all workers in a run without evaluations."""
    trainer = Trainer(world, config)
    try:
        for _ in range(config.train.steps):
            trainer.stop_request = Stop()
            trainer._step()
        return trainer.groups.meter.wire_bytes["outer"]
    finally:
        trainer.close()


def test_estimated_bytes_are_those_counted(ranks, tmp_path, text):
    """A run is one step more without a pause than another one; so the pause and the first broadcast cancel."""
    how = ASYNCHRONOUS | {"train__eval_every": 0, "checkpoint__every": 0, "consistency__server": 1}
    found = []
    for steps in (2, 3):
        config = small_config(tmp_path / f"run-{steps}", text, train__steps=steps, **how)
        found.append(ranks(sent_bytes, 3, config))
    for cost, fewer, more in zip(estimate(config, 3).ranks, *found, strict=True):
        assert cost.wire_bytes == {"outer": more - fewer}, cost.coords


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh__tp": 2}, "consistency.mode asynchronous has the whole model on one server, .* tp=2"),
        ({"zero__stage": 1}, "zero.stage 1 and .* Give --mesh.dp 2 alone"),
        ({"precision__policy": "bf16"}, "precision.policy bf16 do not fit"),
        ({"comm__algorithm": "ring"}, "leave --comm.algorithm and --comm.gradients out"),
        ({"consistency__server": 2}, "consistency.server is 2, and the 2 ranks .* are 0 to 1"),
        ({"fault__live_recovery": True}, "ranks have no step in common"),
        ({"consistency__staleness_bound": 3}, "staleness-bound 3 has no effect: consistency.mode is asynchronous"),
        ({"consistency__mode": "stale", "consistency__staleness_bound": -1}, "staleness-bound is -1; it must be 0 or"),
        ({"consistency__h": 3}, "consistency.h 3 has no effect"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        validate_options(small_config(None, None, **ASYNCHRONOUS | changes), 2)
