"""A stop request saves and ends the run after the same step on all ranks; a second interrupt ends it at once."""

import os
import signal

import pytest

from minidist.fault import folders
from minidist.fault.index import verify_checkpoint
from minidist.tools.launch.run import train_and_report
from tests.helpers.small_run import OPTIONS, Command, small_config, train_small, write_text

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_ranks_saves_and_ends_them(server, tmp_path, number):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=0, train__steps=1_000_000)
    job = server.start(train_and_report, 2, (config,), deadline_s=60)
    while "step      2 " not in job.output(0):
        assert not job.poll(1.0), job.output(0)
    job.send_signal(number)
    first, second = job.wait().values
    assert first["stopped"] and second["stopped"] and first["step"] == second["step"]
    assert not verify_checkpoint(folders.latest_checkpoint(tmp_path / "run" / "checkpoints"))


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
