"""No observer can end a run: what cannot be written is noted once, and the run saves, goes on and ends as it should."""

import errno
import os
import pty
from pathlib import Path

import pytest

from minidist.checkpoint import folders
from minidist.comm import World
from minidist.config import to_toml
from minidist.tools.launch.run import make_observers_and_meter, train_and_report
from minidist.train.observer import Observer
from minidist.train.trainer import train
from tests.helpers.small_run import read_metrics, small_config, train_small, with_changes, write_text

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="writes to /dev/full, which Linux has")


class Spoiler(Observer):
    """Once step 2 is done, calls `spoil(trainer)` on rank 0."""

    def __init__(self, spoil):
        self._spoil = spoil

    def before_step(self, trainer):
        if trainer.progress.step == 2 and trainer.world.rank == 0:
            self._spoil(trainer)


def fill_disk(trainer):
    """Let the metrics and the picture of the loss, but no checkpoint, meet a full disk."""
    for name in ("metrics.jsonl", "loss.png"):
        (trainer.folder / name).unlink(missing_ok=True)
        (trainer.folder / name).symlink_to(FULL)


def train_without_output(world, config, case):
    """Train with a standard output that cannot be written from step 3 on; return the summary of the run."""
    if case == "terminal":
        master, slave = pty.openpty()
        os.dup2(slave, 1)
        os.close(slave)
        spoil = lambda trainer: os.close(master)  # noqa: E731
    elif case == "pipe":
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(write)
        spoil = lambda trainer: os.close(read)  # noqa: E731
    else:
        spoil = lambda trainer: os.dup2(os.open(FULL, os.O_WRONLY), 1)  # noqa: E731
    observers, meter = make_observers_and_meter(config)
    return train(world, config, [Spoiler(spoil), *observers], meter)


@needs_full
@pytest.mark.parametrize("case", ["disk", "pipe", "terminal"])
def test_a_run_outlives_its_standard_output(server, tmp_path, case):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    result = server.run(train_without_output, 2, (config, case), deadline_s=60)
    assert [(summary["step"], summary["stopped"]) for summary in result.values] == [(6, False)] * 2
    assert max(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == 6
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row] == list(range(1, 7))
    note = f"standard output cannot be written: {os.strerror(REASONS[case])}. What is printed there is lost"
    assert result.output[0].count(note) == 1, result.output[0]  # on standard error


REASONS = {"disk": errno.ENOSPC, "pipe": errno.EPIPE, "terminal": errno.EIO}


@needs_full
def test_a_run_outlives_its_metrics_on_a_full_disk_and_notes_each_file_once(tmp_path, capsys):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    observers, meter = make_observers_and_meter(config)
    summary = train(World.single(), config, [Spoiler(fill_disk), *observers], meter)
    assert summary["step"] == 6 and max(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == 6
    printed = capsys.readouterr().out
    for name in ("metrics.jsonl", "loss.png"):
        note = f"{tmp_path / 'run' / name} cannot be written: No space left on device. The run goes on without it."
        assert (printed.count(note), printed.count(f"{name} cannot be written")) == (1, 1)
    assert "step      6 " in printed


def test_rows_that_a_full_disk_refused_are_written_once_it_has_space(tmp_path, monkeypatch):
    whole = small_config(tmp_path / "whole", write_text(tmp_path))
    train_small(World.single(), whole)
    opened, refused = Path.open, []

    def refuse_twice(path, mode="r", *args, **options):
        if path.name == "metrics.jsonl" and mode == "ab" and len(refused) < 2:
            refused.append(path)
            with opened(path, mode) as file:
                file.write(b'{"step": 1, "lo')  # the disk is full in the middle of a line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse_twice)
    train_small(World.single(), with_changes(whole, folder=tmp_path / "run"))
    # The rows of checkpoints, which are saved in the background, have no place of their own.
    rows = [read_metrics(tmp_path / name) for name in ("run", "whole")]
    assert refused and len(rows[0]) == len(rows[1])
    steps = [[row["step"] for row in run if "step" in row] for run in rows]
    assert steps[0] == steps[1]


class Failing(Observer):
    """Fails to write in every method; counts the steps of which it hears, and keeps the notes."""

    def __init__(self):
        self.steps, self.notes = 0, []

    def on_note(self, line):
        self.notes.append(line)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def on_step(self, trainer, result):
        self.steps += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _fail(self, *args):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    on_start = before_step = on_evaluation = before_save = on_checkpoint = on_last_step = on_end = close = _fail


def test_an_observer_that_cannot_write_is_noted_once_and_still_called(tmp_path):
    observer = Failing()
    summary = train(World.single(), small_config(tmp_path / "run", write_text(tmp_path)), [observer])
    assert summary["step"] == observer.steps == 6
    assert observer.notes == ["the output of Failing cannot be written: Broken pipe. The run goes on without it."]


def test_metrics_that_cannot_be_read_are_kept_and_the_run_goes_on(server, tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    result = server.run(train_and_report, 2, (config,), deadline_s=60)
    assert [summary["step"] for summary in result.values] == [6, 6]
    assert "metrics.jsonl cannot be written: Is a directory. The run goes on without it." in result.output[0]
