"""Hung ranks: named with the state of their process, killed after a limit, and not before it."""

import os
import signal

import pytest
import torch

from minidist.comm import GroupSpec, all_reduce, bind
from minidist.comm.status import Channel
from minidist.mesh import Mesh
from minidist.tools.deadlock import watchdog
from minidist.tools.deadlock.hang import STOPPED
from minidist.tools.launch import RankFailure
from tests.helpers.processes import needs_proc, run_python, wait_until
from tests.helpers.status_pages import GRADS, mark_waiting
from tests.helpers.watch import SimulatedRanks

pytestmark = pytest.mark.process_lifecycle

DEADLINE_S = 60.0


def reduce_while_one_hangs(world, how):
    grads = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))])["grads"]
    if world.rank == 1 and how == "stop within":  # it has launched the operation, and does not take part
        world.status.on_launch(grads.collective_channel, "all_reduce", (2,), "float32")
    if world.rank == 1 and how.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    while world.rank == 1 and how == "loop":
        sum(range(1000))
    all_reduce(torch.ones(2), grads)


@needs_proc
@pytest.mark.parametrize("how", ["stop", "stop within", "loop"])
def test_a_hung_rank_is_killed_after_the_limit(server, capfd, how):
    with pytest.raises(RankFailure) as caught:
        server.run(reduce_while_one_hangs, 3, (how,), deadline_s=DEADLINE_S, hang_limit_s=3.0)
    assert (caught.value.kind, caught.value.ranks) == ("died", (1,))
    assert "rank 1 died: killed by SIGKILL after ranks 0, 2 have waited for it for 3 s" in str(caught.value)
    named = f"rank 1 keeps others waiting: {STOPPED}; ranks 0, 2 have waited for it for 2 s\n"
    assert capfd.readouterr().err == (named if how.startswith("stop") else "")


@needs_proc
def test_a_request_to_stop_ends_a_job_whose_rank_is_stopped(server):
    job = server.start(reduce_while_one_hangs, 2, ("stop",), deadline_s=DEADLINE_S)
    assert wait_until(lambda: not job.poll(0.02) and _is_stopped(job.pids[1]), DEADLINE_S)
    job.stop(signal.SIGURG)  # ignored by default, as SIGTERM is by a trainer that saves first
    with pytest.raises(RankFailure, match=f"rank 1 .*{STOPPED[:7]}") as caught:
        job.wait()
    assert caught.value.kind == "hang"


def reduce_after_a_file_exists(world, file):
    """Rank 0 waits in an all-reduce for rank 1, which runs until the file exists; returns the sum."""
    grads = bind(world, Mesh(dp=2), [GroupSpec("grads", ("dp",))])["grads"]
    if world.rank == 1:
        assert wait_until(file.exists, DEADLINE_S)
    tensor = torch.ones(1)
    all_reduce(tensor, grads)
    return float(tensor)


@needs_proc
def test_a_request_to_stop_leaves_time_to_a_rank_that_is_slow(server, tmp_path, monkeypatch):
    monkeypatch.setattr("minidist.tools.launch.job.NOTICE_S", 0.0)
    job = server.start(reduce_after_a_file_exists, 2, (tmp_path / "go",), deadline_s=DEADLINE_S)
    assert wait_until(lambda: job.poll(0.02) or job._noted_hangs, DEADLINE_S) and not job.has_ended
    job.stop(signal.SIGURG)  # ignored by default, as SIGTERM is by a trainer that saves first
    for _ in range(20):
        job.poll(0.05)
    (tmp_path / "go").touch()
    assert job.wait().values == [2.0, 2.0]


def _is_stopped(pid):
    return pid and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "T"


def test_a_rank_in_an_endless_loop_is_named_with_its_line(server, capfd):
    job = server.start(reduce_while_one_hangs, 2, ("loop",), deadline_s=DEADLINE_S)
    printed = []
    assert wait_until(lambda: job.poll(0.1) or printed.append(capfd.readouterr().err) or any(printed), DEADLINE_S)
    job.kill()
    head, _, rest = "".join(printed).partition("; ")
    assert head.startswith("rank 1 keeps others waiting: running at tools/test_hang.py:")
    assert rest.startswith("rank 0 has waited for it for 1")


# Under torchrun: through the store, by a virtual clock


@pytest.fixture
def kills(monkeypatch):
    """The (process id, signal) that the watchdog would have sent."""
    sent = []
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_a_stopped_rank_is_named_within_seconds_and_killed_by_its_machine(monkeypatch, kills):
    monkeypatch.setattr(watchdog, "describe_process", lambda pid: STOPPED)
    world = SimulatedRanks(3, nodes=[0, 1, 1], hang_limit_s=8.0)
    world.silent.add(1)
    mark_waiting(world.pages[0], GRADS)
    mark_waiting(world.pages[2], GRADS)
    assert world.run(6) is None and not kills
    (note,) = world.notes
    assert note[0] < 4 and note[2].startswith(f"rank 1 keeps others waiting: {STOPPED}; ranks 0, 2 have waited")
    assert world.run(4) is None
    assert kills == [(os.getpid(), signal.SIGKILL)]  # by rank 2, which is on its machine
    assert world.notes[-1][2] == "rank 1 is killed: ranks 0, 2 have waited for it for 8 s"
    assert "rank 1 does not end although it was killed" in world.run(6)  # it never died: the leader ends the run


def test_a_stopped_rank_alone_on_its_machine_is_named_too(kills):
    world = SimulatedRanks(2, nodes=[0, 1])
    world.silent.add(1)
    mark_waiting(world.pages[0], Channel("collective", "grads", (0, 1)))
    world.run(15)
    assert "rank 1 keeps others waiting: it does not answer; rank 0 has waited for it for 10 s" in world.notes[0][2]


def test_a_slow_rank_is_named_once_with_its_line_and_lives_until_the_limit(kills):
    world = SimulatedRanks(2, hang_limit_s=540.0)
    mark_waiting(world.pages[0], Channel("collective", "grads", (0, 1)))
    assert world.run(530) is None and not kills
    ((when_s, _, note),) = world.notes
    assert 10 <= when_s < 13 and "rank 1 keeps others waiting: running at helpers/watch.py:" in note


def test_a_rank_that_goes_on_from_time_to_time_is_never_killed(kills):
    world = SimulatedRanks(2, hang_limit_s=20.0)
    for _ in range(5):
        mark_waiting(world.pages[0], Channel("collective", "grads", (0, 1)))
        assert world.run(15) is None
        world.pages[1].on_launch(Channel("collective", "grads", (0, 1)), "all_reduce", (4,), "float32")
        world.pages[0].on_resume()
        world.run(0.3)
    assert not kills


PROGRAM = """
import os, signal, torch
from minidist.comm import GroupSpec, all_reduce, bind
from minidist.mesh import Mesh
from minidist.tools.launch.torchrun import torchrun_world
with torchrun_world(device="cpu", hang_limit_s=4.0) as world:
    grads = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))])["grads"]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(torch.ones(1), grads)
"""


@needs_proc
def test_torchrun_sees_the_death_of_a_stopped_rank(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert ended.returncode == 1
    assert f"rank 1 keeps others waiting: {STOPPED}; rank 0 has waited for it for " in ended.stderr
    assert "rank 1 is killed: rank 0 has waited for it for 4 s" in ended.stderr
    assert "Signal 9 (SIGKILL) received by PID" in ended.stderr
