"""Runs that continue by themselves: the newest intact checkpoint of a run folder, and one live run per folder."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.comm import World, barrier, bind
from minidist.errors import DamagedError, UserError
from minidist.mesh import Mesh
from minidist.tools.launch.run_folder_guard import RunLock, open_checked_run_folder
from minidist.train.run_folder import AUTO
from tests.helpers.small_run import (
    OPTIONS,
    Command,
    descendants,
    read_curve,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    with_resume,
    write_text,
)
from tests.helpers.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=2)


def starts_of(folder):
    return [row["start"] for row in read_metrics(folder) if "start" in row]


def checkpoint_of(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}"


def flip_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("resume", [None, AUTO])
def test_the_same_run_again_continues_in_its_folder(config, tmp_path, resume):
    train_small(World.single(), with_changes(config, folder=tmp_path / "whole"))
    train_small(World.single(), config, stop_after=3)
    train_small(World.single(), with_resume(config, resume))
    assert starts_of(tmp_path / "run") == [0, 3]
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "whole")


def test_a_folder_without_a_checkpoint_starts_from_the_beginning(config, tmp_path):
    summary = train_small(World.single(), with_resume(config, AUTO))
    assert summary["step"] == 6 and starts_of(tmp_path / "run") == [0]


def test_a_finished_run_just_ends(config):
    first = train_small(World.single(), config)
    assert train_small(World.single(), config)["held_out_loss"] == first["held_out_loss"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_continues_the_run(ranks, config, tmp_path, size):
    whole = with_changes(config, folder=tmp_path / "whole")
    ranks(train_small, 2, whole)
    ranks(train_small, 2, config, 3)
    ranks(train_small, size, config)
    for row, expected in zip(read_curve(tmp_path / "run"), read_curve(tmp_path / "whole"), strict=True):
        assert row["step"] == expected["step"]
        if "loss" in row:
            # Sums of 12 samples' float32 gradients in another order: 12 eps a step, over three steps at a rate of 0.5.
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("damaged", ["rank-00000.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(config, tmp_path, damaged, capsys):
    train_small(World.single(), config, stop_after=5)
    file = checkpoint_of(tmp_path / "run", 5) / damaged
    flip_byte(file)
    capsys.readouterr()
    train_small(World.single(), config)
    assert starts_of(tmp_path / "run") == [0, 4]
    assert str(file) in re.sub(r"\s*\n\s*", " ", capsys.readouterr().out)


def test_a_run_with_only_damaged_checkpoints_is_refused(config, tmp_path):
    train_small(World.single(), config, stop_after=3)
    for step in (2, 3):
        flip_byte(checkpoint_of(tmp_path / "run", step) / "rank-00000.safetensors")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(DamagedError, match="No other checkpoint in .* is intact"):
        train_small(World.single(), config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_another_run_is_refused_with_the_options_that_differ(config, tmp_path):
    train_small(World.single(), config, stop_after=3)
    other = with_changes(config, optim__lr=0.25, train__steps=9)
    expected = r"holds a run with other options \(optim.lr 0.5 there, 0.25 here, train.steps 6 there, 9 here\)"
    with pytest.raises(UserError, match=expected):
        open_checked_run_folder(other)
    # Asked for in so many words, the run goes on under the new options.
    assert train_small(World.single(), with_resume(other, AUTO))["step"] == 9
    # The number of ranks, logging and recomputation change no loss.
    changes = {"optim__lr": 0.25, "train__steps": 9, "train__log_every": 3, "recompute": "block"}
    run = open_checked_run_folder(with_changes(config, **changes))
    assert run.checkpoints[0] == checkpoint_of(tmp_path / "run", 9)


def test_auto_needs_a_folder(config):
    with pytest.raises(UserError, match="name it with --folder"):
        open_checked_run_folder(with_resume(config, AUTO, folder=None))


def train_in_a_folder_in_use(world, config):
    """On rank 1, why a run in the folder that rank 0 has locked is refused; None if it is not."""
    control, message = bind(world, Mesh(dp=2), [])["control"], None
    lock = RunLock(config.folder) if world.rank == 0 else None
    barrier(control)
    if world.rank == 1:
        try:
            train_small(World.single(), config)
        except UserError as error:
            message = str(error)
    barrier(control)
    if lock is not None:
        lock.release()
    return message


def test_a_second_live_run_in_a_folder_is_refused(ranks, config, tmp_path):
    (tmp_path / "run").mkdir()
    _, message = ranks(train_in_a_folder_in_use, 2, config)
    assert message is not None and "is in use by another run (process " in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


HOLD_LOCK = """
from pathlib import Path
from minidist.tools.launch.run_folder_guard import RunLock
lock = RunLock(Path("run"))
print("locked", flush=True)
input()
"""


def test_a_folder_belongs_to_one_live_run_and_is_free_when_its_process_dies(config, tmp_path):
    (tmp_path / "run").mkdir()
    owner = warm_python.popen(
        [sys.executable, "-c", HOLD_LOCK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"is in use by another run \\(process {owner.pid} on "):
            train_small(World.single(), config)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    finally:
        owner.kill()
        owner.communicate()
    assert train_small(World.single(), config)["step"] == 6


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "minidist")
LONG = (
    *OPTIONS,
    "--train.steps",
    "300",
    "--checkpoint.every",
    "20",
    "--train.log-every",
    "1",
    "--train.eval-every",
    "0",
)


@pytest.mark.exhaustive  # test_elastic has a restart under torchrun in the quick suite
def test_torchrun_restarts_a_run_in_its_folder_from_its_newest_checkpoint(tmp_path):
    train = ("train", *LONG, "--data.path", write_text(tmp_path))
    with Command(*train, module=TORCHRUN, folder=tmp_path) as command:
        command.read_until("checkpoint: ")
        ranks = [pid for pid, parent in descendants(command.process.pid).items() if parent == command.process.pid]
        os.kill(ranks[1], signal.SIGKILL)
        assert command.end() == 0, command.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["0001"]
    run = tmp_path / "runs" / "0001"
    first, second = starts_of(run)
    assert first == 0 and second >= 20 and second % 20 == 0
    with Command(*train, "--folder", "whole", module=TORCHRUN, folder=tmp_path) as command:
        assert command.end() == 0, command.output
    assert read_curve(run) == read_curve(tmp_path / "whole")
