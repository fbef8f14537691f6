"""The rank server: endless loops, dead processes, signals, and cleaning up after them."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.tools.launch import RankFailure, forward_signals, protocol
from tests.helpers.processes import is_alive, needs_proc, wait_until

pytestmark = pytest.mark.process_lifecycle

DEADLINE_S = 240.0
ROOT = Path(__file__).resolve().parents[2]
KEPT = []


def double(world, tensor):
    return tensor * 2


def loop_for_ever(world, child):
    if child and world.rank == 0:
        KEPT.append(subprocess.Popen(["sleep", "1000"]))
        print(KEPT[0].pid, flush=True)
    while True:
        sum(range(1000))


def leave_a_file(world, folder):
    atexit.register(Path(folder, f"rank-{world.rank}").write_text, "done")
    return world.rank


@pytest.mark.parametrize("clean_exit", [True, False])
def test_ranks_can_skip_exit_functions(ranks, tmp_path, clean_exit):
    assert ranks(leave_a_file, 2, str(tmp_path), clean_exit=clean_exit) == [0, 1]
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == (["rank-0", "rank-1"] if clean_exit else [])


def babble(world):
    if world.rank == 1:
        protocol.len = lambda _: 1  # as when its code assigns to `builtins.len`


def test_a_rank_that_sends_invalid_messages_is_reported_as_died(ranks):
    with pytest.raises(RankFailure, match="rank 1 died: its messages cannot be unpickled") as failure:
        ranks(babble, 2)
    assert failure.value.ranks == (1,)
    assert ranks(leave_a_file, 2, "/nowhere", clean_exit=False) == [0, 1]  # the server is as before


def meet(world):
    world.store.set(f"rank-{world.rank}", "here")
    if world.rank == 0:
        return ["here"] * world.size  # the others find the meeting point after that, too
    sum(range(3_000_000))
    return [world.store.get(f"rank-{rank}").decode() for rank in range(world.size)]


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_ranks_meet_with_and_without_a_process_group(ranks, backend):
    assert ranks(meet, 3, backend=backend) == [["here"] * 3] * 3


def test_the_launcher_does_not_import_torch():
    modules = "minidist.tools.launch.live_job, exercises.check, exercises.rank_tests, exercises.stuck_ranks"
    ask = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], cwd=ROOT, timeout=240).returncode == 0


def test_an_endless_loop_ends_at_the_deadline_with_its_line(ranks):
    for deadline_s in (0.5, 4.0, 32.0):  # a busy machine may need longer to come as far as the loop
        with pytest.raises(RankFailure) as caught:
            ranks(loop_for_ever, 2, False, backend=None, deadline_s=deadline_s)
        error = caught.value
        assert error.kind == "deadline" and f"the ranks were not done after {deadline_s:g} s" in str(error)
        if all("in loop_for_ever" in error.stacks.get(rank, "") for rank in range(2)):
            break
    assert "in loop_for_ever" in str(error) and "launch/" not in error.stacks[0]


@needs_proc
def test_a_killed_rank_takes_its_job_and_its_own_children_along(server):
    job = server.start(loop_for_ever, 3, (True,))
    assert wait_until(lambda: not job.poll(0.01) and all(job.pids) and job.output(0).endswith("\n"))
    assert wait_until(lambda: all(page and page.state == "running" for page in job.status_snapshots()))
    pids, child = job.pids, int(job.output(0))
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankFailure) as caught:
        job.wait()
    assert caught.value.ranks == (0,)
    assert str(caught.value).startswith("rank 0 died: killed by SIGKILL\nmeanwhile\n  ranks 1-2: running")
    assert wait_until(lambda: not any(map(is_alive, [*pids, child])))


def crash(world):
    if world.rank == 1:
        signal.raise_signal(signal.SIGSEGV)  # in this thread: os.kill may choose one of gloo's
    dist.barrier()


def test_a_crash_is_reported_with_its_signal_and_python_stack(server):
    with pytest.raises(RankFailure) as caught:
        server.run(crash, 2, backend="gloo", deadline_s=DEADLINE_S)
    line = crash.__code__.co_firstlineno + 2
    stack = f'Python stack, innermost call first:\n  File "{__file__}", line {line} in crash'
    assert caught.value.stacks == {1: stack}
    assert str(caught.value).startswith(f"rank 1 died: killed by SIGSEGV\n  {stack.replace('  ', '    ')}\nmeanwhile\n")


def receive_too_much(world):
    if world.rank:
        dist.send(torch.ones(100), 0)
        loop_for_ever(world, False)
    dist.recv(torch.ones(10), 1)


def test_a_crash_in_a_thread_of_gloo_is_reported_with_its_reason_and_where_the_main_thread_was(server):
    with pytest.raises(RankFailure) as caught:
        server.run(receive_too_much, 2, backend="gloo", deadline_s=DEADLINE_S)
    report = str(caught.value)
    assert report.startswith("rank 0 died: killed by SIGABRT\n  terminate called after throwing an instance of 'gloo::")
    assert "a thread without Python code crashed; stack of the main thread, innermost call first:\n" in report
    assert f'"{__file__}", line {receive_too_much.__code__.co_firstlineno + 4} in receive_too_much' in report


def hold_the_interpreter(world):
    print("holding", flush=True)
    sum(range(10**15))  # one call into C, in which no other thread of this process can run


@needs_proc
def test_a_killed_server_takes_its_ranks_along_and_its_successor_has_one_thread(server, ranks):
    job = server.start(hold_the_interpreter, 2)
    assert wait_until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "holding\n")
    pids = [*job.pids, server.pid]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="the rank server .* died, and all ranks with it"):
        job.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    server.ensure_ready()
    # Before its first fork: OpenBLAS would end its threads when the process forks.
    assert "Threads:\t1\n" in Path(f"/proc/{server.pid}/status").read_text()
    assert ranks(double, 2, 4) == [8, 8]


PARENT = """
import subprocess, sys
sys.path.insert(0, {root!r})
from minidist.tools.launch import RankServer
class Own:
    def __init__(self, rank): self.rank = rank
def make(world): return Own(world.rank)
def loop(world):
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, flush=True)
    sum(range(10**15))
if __name__ == "__main__":
    with RankServer(preload=()) as server:
        print(*[value.rank for value in server.run(make, 2).values], flush=True)
        job = server.start(loop, 2)
        while not (job.output(0) and job.output(1)): job.poll(0.1)
        print(server.pid, *job.pids, job.output(0).strip(), job.output(1).strip(), flush=True)
        job.wait()
"""


@needs_proc
def test_a_killed_parent_leaves_no_process(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(ROOT)))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "0 1\n"  # classes of a script's __main__ travel too
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 5 and all(map(is_alive, pids))
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
    assert wait_until(lambda: not any(map(is_alive, pids)))


@needs_proc
def test_an_interrupted_wait_leaves_no_rank(server):
    job = server.start(loop_for_ever, 2, (False,))
    assert wait_until(lambda: not job.poll(0.01) and all(job.pids))
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    timer.join()
    signal.signal(signal.SIGUSR2, before)
    assert not any(map(is_alive, job.pids))


# A job that its caller watches


def until_told(world):
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    print("ready", flush=True)
    while not signals:
        sum(range(1000))
    return f"saved by {world.rank}"


def test_a_forwarded_signal_lets_ranks_end_in_their_own_way(server):
    job = server.start(until_told, 2, deadline_s=DEADLINE_S)
    with forward_signals(job, signal.SIGTERM):
        assert wait_until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "ready\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.wait().values == ["saved by 0", "saved by 1"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_running_job_has_status_pages_and_stacks_and_can_be_killed(server):
    job = server.start(until_told, 2)
    assert wait_until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "ready\n")
    assert [page.state for page in job.status_snapshots()] == ["running", "running"]
    assert all("in until_told" in stack for stack in job.dump_stacks().values())
    job.kill()
    assert job.has_ended and job.poll()
    with pytest.raises(RankFailure, match="the job was killed"):
        job.wait()


def test_two_jobs_run_side_by_side(server):
    first = server.start(until_told, 1)
    assert server.run(double, 2, (3,), deadline_s=DEADLINE_S).values == [6, 6]
    first.kill()
