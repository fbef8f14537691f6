"""A stop request saves and ends the run after the same step on all ranks; a second interrupt ends it at once."""

import contextlib
import os
import signal

import pytest
import torch

from minidist.checkpoint import folders
from minidist.checkpoint.index import verify_checkpoint
from minidist.fault.signals import StopSignalRecorder
from minidist.tools.launch.run import train_and_report
from minidist.train.observer import Observer
from minidist.train.trainer import train
from tests.helpers.processes import wait_until
from tests.helpers.small_run import (
    DEADLINE_S,
    OPTIONS,
    Command,
    make_trainer,
    read_metrics,
    small_config,
    train_small,
    write_text,
)

LONG = ("--train.steps", "1000000", "--checkpoint.every", "0", "--train.log-every", "1", "--folder", "run")


def stop_on_one(world, config, rank):
    return train_small(world, config, stop_after=3 if world.rank == rank else None)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_request_on_one_rank_ends_all_ranks_after_that_step(ranks, tmp_path, rank):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=0)
    by_rank = ranks(stop_on_one, 3, config, rank)
    assert [(summary["step"], summary["stopped"]) for summary in by_rank] == [(3, True)] * 3
    assert list(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == [3]
    assert (tmp_path / "run" / "loss.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_ranks_saves_and_ends_them(server, tmp_path, number):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=0, train__steps=1_000_000)
    job = server.start(train_and_report, 2, (config,), deadline_s=60)
    while "step      2 " not in job.output(0):
        assert not job.poll(1.0), job.output(0)
    job.send_signal(number)
    first, second = job.wait().values
    assert first["stopped"] and second["stopped"] and first["step"] == second["step"]
    assert not verify_checkpoint(folders.latest_checkpoint(tmp_path / "run" / "checkpoints"))


def run_with_a_signal(world, config, place):
    """Send SIGTERM to rank 0 when it begins to evaluate or to save; returns the summary and how often it did either."""
    torch.set_num_threads(1)
    with StopSignalRecorder() as stop, contextlib.closing(make_trainer(world, config)) as trainer:
        calls, saver, loop = {"evaluate": 0, "copy": 0}, trainer.saver, trainer.engine.forward_backward

        def count(name):
            calls[name] += 1
            if world.rank == 0 and name == place and calls[name] == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        sum_losses_and_tokens = loop.sum_losses_and_tokens
        loop.sum_losses_and_tokens = lambda batches: (count("evaluate"), sum_losses_and_tokens(batches))[1]
        saver.on_phase = lambda phase, step: count(phase) if phase == "copy" else None
        summary = trainer.run(stop)
    return summary["step"], summary["stopped"], summary["stop_signal"], calls


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("place", ["evaluate", "copy"])
def test_a_signal_during_an_evaluation_or_a_save_ends_the_run_before_another_step(ranks, tmp_path, place, background):
    changes = {"train__eval_every": 2, "train__eval_samples": 48, "checkpoint__every": 3}
    changes |= {"train__micro_batches": 1, "checkpoint__background": background}
    config = small_config(tmp_path / "run", write_text(tmp_path), **changes)
    step = 2 if place == "evaluate" else 3
    # Of the four micro-batches of the evaluation, it leaves out three; the save goes to its end, without another.
    calls = {"evaluate": 1 if place == "evaluate" else 4, "copy": 1}
    by_rank = ranks(run_with_a_signal, 2, config, place)
    assert by_rank == [(step, True, "SIGTERM", calls), (step, True, None, calls)]
    assert not verify_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    assert list(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == [step]
    assert not any("held_out_loss" in row and row["step"] == 3 for row in read_metrics(tmp_path / "run"))


def test_a_signal_during_the_last_evaluation_ends_it(ranks, tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), train__eval_samples=48, train__micro_batches=1)
    by_rank = ranks(run_with_a_signal, 2, config, "evaluate")
    assert [(step, stopped, calls["evaluate"]) for step, stopped, _, calls in by_rank] == [(6, True, 1)] * 2
    assert max(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == 6


class SlowInStepTwo(Observer):
    """Rank 1 begins step 2 once the file `folder/go` exists; rank 0 writes its process id to `folder/pid`."""

    def __init__(self, folder):
        self._folder = folder

    def before_step(self, trainer):
        if trainer.progress.step == 1 and trainer.world.rank == 1:
            assert wait_until((self._folder / "go").exists)
        elif trainer.progress.step == 1:
            (self._folder / "pid.partial").write_text(str(os.getpid()))
            (self._folder / "pid.partial").rename(self._folder / "pid")


def train_with_a_slow_rank(world, config, folder):
    torch.set_num_threads(1)
    summary = train(world, config, [SlowInStepTwo(folder)])
    return summary["step"], summary["stopped"]


def test_a_signal_to_a_rank_that_waits_for_a_slow_rank_ends_the_run_with_that_step(server, tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=0)
    job = server.start(train_with_a_slow_rank, 2, (config, tmp_path), deadline_s=DEADLINE_S)
    while not (tmp_path / "pid").exists() or not is_waiting(job.status_snapshots()[0]):
        assert not job.poll(0.1), job.output(0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)  # it has arrived when the call returns
    (tmp_path / "go").touch()
    assert job.wait().values == [(2, True)] * 2
    assert list(folders.complete_checkpoints(tmp_path / "run" / "checkpoints")) == [2]


def is_waiting(snapshot) -> bool:
    return snapshot is not None and snapshot.state == "waiting"


def test_a_signal_to_the_command_saves_and_ends_it_with_success(tmp_path):
    with Command("train", *OPTIONS, *LONG, "--data.path", write_text(tmp_path), folder=tmp_path) as command:
        command.read_until("step      2 ")
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.end() == 0, command.output
    assert "SIGTERM: saving after this step" in command.output
    assert "of 1000000: go on with --checkpoint.resume run" in command.output.splitlines()[-1]
    assert not verify_checkpoint(folders.latest_checkpoint(tmp_path / "run" / "checkpoints"))


def test_a_second_interrupt_ends_the_command_at_once(tmp_path):
    # A step of minutes: only the second interrupt can end it in time.
    slow = ("--train.global-batch", "20000", "--ranks", "1", "--model.num-layers", "8", "--data.seq-len", "128")
    text = write_text(tmp_path)
    text.write_text(text.read_text() * 20)
    with Command("train", *OPTIONS, *LONG, *slow, "--data.path", text, folder=tmp_path) as command:
        command.read_until("steps of 20000 samples")
        os.kill(command.process.pid, signal.SIGINT)
        command.read_until("SIGINT: saving after this step; a second SIGINT ends the run at once")
        os.kill(command.process.pid, signal.SIGINT)
        assert command.end() == 130, command.output
    assert command.output.splitlines()[-1] == "minidist: ended at once. No checkpoint had been written yet."


def test_under_torchrun_a_signal_saves_and_ends_all_ranks(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minidist")
    text = write_text(tmp_path)
    with Command("train", *OPTIONS, *LONG, "--data.path", text, module=torchrun, folder=tmp_path) as command:
        command.read_until("step      2 ")
        os.kill(command.process.pid, signal.SIGTERM)
        command.end()  # torchrun itself ends with 1
    assert "of 1000000: go on with --checkpoint.resume run" in command.output
    assert not verify_checkpoint(folders.latest_checkpoint(tmp_path / "run" / "checkpoints"))
