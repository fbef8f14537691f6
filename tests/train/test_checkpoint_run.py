"""Checkpoints of a run: saved in the background or not, when the disk is full, and which of them are kept."""

import contextlib

import pytest

from minidist.checkpoint import save
from minidist.checkpoint.folders import complete_checkpoints
from minidist.comm import World, barrier
from minidist.errors import RunError
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer
from tests.helpers.small_run import Stop, read_curve, small_config, train_small, with_changes, write_text


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=2, checkpoint__keep=9)


def names_in(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def tensor_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("zero__stage", [0, 1, 3])
def test_saving_in_the_background_saves_the_same_and_trains_the_same(ranks, config, tmp_path, zero__stage):
    config = with_changes(config, optim__kind="adamw", optim__lr=3e-3, zero__stage=zero__stage)
    ranks(train_small, 2, config)
    ranks(train_small, 2, with_changes(config, folder=tmp_path / "waits", checkpoint__background=False))
    files = tensor_files(tmp_path / "run")
    assert len(files) == 6 and files == tensor_files(tmp_path / "waits")
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "waits")


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_ends_the_run_only_if_its_last_state_is_lost(config, tmp_path, monkeypatch, capsys, background):
    real = save.write_tensor_file

    def full_disk(file, tensors):
        if file.parent.name.startswith(full):
            raise OSError(28, "No space left on device")
        return real(file, tensors)

    monkeypatch.setattr(save, "write_tensor_file", full_disk)
    config, full = with_changes(config, checkpoint__background=background), "step-00000004"
    if background:
        train_small(World.single(), config)
        assert "the checkpoint of step 4 was not written" in " ".join(capsys.readouterr().out.split())
        assert names_in(tmp_path / "run") == ["step-00000002", "step-00000006"]
    full = "step-00000006"
    with pytest.raises(RunError, match="the last complete one is .*step-0000000[24]"):
        train_small(World.single(), with_changes(config, folder=tmp_path / "again"))


def test_every_nth_checkpoint_is_kept(config, tmp_path):
    train_small(World.single(), with_changes(config, checkpoint__every=1, checkpoint__keep=1, checkpoint__keep_every=2))
    assert names_in(tmp_path / "run") == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_resumed_run_prunes_the_checkpoints_of_the_one_before(config, tmp_path):
    config = with_changes(config, checkpoint__every=1, checkpoint__keep=2, checkpoint__keep_every=3)
    train_small(World.single(), config, stop_after=4)
    assert names_in(tmp_path / "run") == ["step-00000003", "step-00000004"]
    (tmp_path / "run" / "checkpoints" / "step-00000005.partial").mkdir()  # a save that was killed
    train_small(World.single(), with_changes(config, train__steps=6))
    assert names_in(tmp_path / "run") == ["step-00000003", "step-00000005", "step-00000006"]


class CheckpointsAfterEachStep(Observer):
    """Observer that lets no rank begin a step before all ranks have written the files of the save in flight.

    complete: by step, the steps of the complete checkpoints when the step has been made. reported: those that
    `on_checkpoint` was called with.
    """

    def __init__(self):
        self.complete, self.reported = {}, []

    def before_step(self, trainer):
        if trainer.saver.is_saving:
            trainer.saver._save.file.result()
        barrier(trainer.control)

    def on_step(self, trainer, result):
        self.complete[trainer.progress.step] = list(complete_checkpoints(trainer.saver.root))

    def on_checkpoint(self, path):
        self.reported.append(path.name)


def watch_checkpoints(world, config):
    observer = CheckpointsAfterEachStep()
    with contextlib.closing(Trainer(world, config, [observer])) as trainer:
        trainer.run(Stop())
    return observer.complete, observer.reported


MODES = ("synchronous", "local", "diloco", "gossip", "asynchronous", "stale")


@pytest.mark.parametrize("mode", MODES)
def test_a_written_checkpoint_is_complete_a_step_later(ranks, config, tmp_path, mode):
    """Also if the ranks meet only at the end of the run, as replicas do that are merged every six steps."""
    config = with_changes(config, consistency__mode=mode, train__log_every=6, checkpoint__every=4)
    if config.consistency.merges_replicas:
        config = with_changes(config, consistency__h=6)
    (complete, reported), (_, reported_elsewhere) = ranks(watch_checkpoints, 2, config)
    assert complete == {1: [], 2: [], 3: [], 4: [], 5: [4], 6: [4]}
    assert reported == reported_elsewhere == ["step-00000004", "step-00000006"]
    for name in names_in(tmp_path / "run"):
        assert len(list((tmp_path / "run" / "checkpoints" / name).iterdir())) <= 3  # two ranks' files and the index


def test_an_unfinished_checkpoint_is_mentioned_at_the_next_start(config, tmp_path, capsys):
    train_small(World.single(), config, stop_after=3)
    (tmp_path / "run" / "checkpoints" / "step-00000004.partial").mkdir()  # a save that was killed
    capsys.readouterr()
    train_small(World.single(), config)
    output = " ".join(capsys.readouterr().out.split())
    assert "because a run ended while it saved or deleted a checkpoint: step-00000004.partial. It is not used" in output
