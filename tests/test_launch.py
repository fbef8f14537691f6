"""The rank server: results, errors, deaths and what they leave behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.errors import RunError, UserError
from minidist.train.launch import RankFailure, RankServer, forward_signals, threads_per_rank
from minidist.train.launch.place import choose_backend, choose_device

DEADLINE_S = 60.0
ROOT = Path(__file__).parent.parent
KEPT = []


def alive(pid: int) -> bool:
    """Whether the process exists and is not just a zombie that its parent has not asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, deadline_s=20.0) -> bool:
    """Whether the condition comes true by the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        os.sched_yield()
    return bool(condition())


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc")


# What ranks are given and give back


def place_and_sum(world, start):
    KEPT.append(world.rank)
    total = torch.tensor([float(world.rank + start)])
    dist.all_reduce(total)
    print(f"I am {world.rank}", flush=True)
    print("to stderr", file=sys.stderr)
    return world.rank, world.size, world.local_rank, world.backend, total.item(), len(KEPT)


def test_ranks_return_values_and_output_by_rank(server):
    for _ in range(2):  # the second ranks are as fresh as the first: KEPT has one entry again
        result = server.run(place_and_sum, 3, (10,), deadline_s=DEADLINE_S)
        assert result.values == [(rank, 3, rank, "gloo", 33.0, 1) for rank in range(3)]
        assert result.output == [f"I am {rank}\nto stderr\n" for rank in range(3)]


def double(world, tensor):
    return tensor * 2


def test_large_arguments_and_results_pass(ranks):
    tensor = torch.arange(4_000_000, dtype=torch.float64)  # 32 MB, far more than a socket holds
    for doubled in ranks(double, 2, tensor):
        assert torch.equal(doubled, tensor * 2)


def surroundings(world):
    return os.getcwd(), os.environ.get("SAID_LATE"), torch.get_num_threads(), dist.is_initialized(), world.backend


def test_a_rank_has_the_folder_environment_and_threads_of_its_launch(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID_LATE", "yes")
    assert ranks(surroundings, 2) == [(str(tmp_path), "yes", threads_per_rank(2), True, "gloo")] * 2
    assert ranks(surroundings, 1, threads=3) == [(str(tmp_path), "yes", 3, False, None)]
    assert ranks(surroundings, 1, backend="gloo")[0][3:] == (True, "gloo")
    assert ranks(surroundings, 2, backend=None)[0][3:] == (False, None)


def test_without_capture_ranks_write_to_our_own_output(server, capfd):
    result = server.run(place_and_sum, 2, (0,), capture=False, deadline_s=DEADLINE_S)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["I am 0", "I am 1"] and err == "to stderr\n" * 2
    assert result.output == ["", ""]


def debug_level(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_debug_level().name, total.item(), os.getppid()


def test_spawned_ranks_and_variables_set_before_torch():
    with RankServer(method="spawn", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as server:
        values = server.run(debug_level, 2, deadline_s=DEADLINE_S).values
        assert values == [("DETAIL", 2.0, server.pid)] * 2


def load_by_path(file):
    """Import a file under a name that no other process could import."""
    spec = importlib.util.spec_from_file_location("only_known_here", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_known_here"] = module
    spec.loader.exec_module(module)
    return module


def test_functions_of_files_that_cannot_be_imported_go_by_path(ranks, tmp_path, monkeypatch):
    file = tmp_path / "script.py"
    file.write_text(
        "import os\nassert 'BROKEN' not in os.environ, 'no such luck'\n"
        "class Answer:\n    pass\n"
        "def answer(world, given):\n    given.rank = world.rank\n    return given\n"
    )
    module = load_by_path(file)
    assert [value.rank for value in ranks(module.answer, 2, module.Answer())] == [0, 1]
    monkeypatch.setenv("BROKEN", "yes")
    with pytest.raises(RunError) as caught:
        ranks(module.answer, 2, 1)
    assert f"{file} cannot be imported on the ranks: AssertionError: no such luck" in str(caught.value)


# What cannot work is said at once


def test_only_functions_of_files_can_be_sent(server):
    with pytest.raises(UserError, match="define it with `def` at the top level of a file"):
        server.run(lambda world: None, 2)


def test_arguments_that_cannot_be_pickled_are_refused(server):
    with pytest.raises(UserError, match="arguments of double cannot be sent to ranks"):
        server.run(double, 2, (lambda: None,))


@pytest.mark.parametrize("count", [0, -1, 2.0])
def test_a_number_of_ranks_that_is_none_is_refused(server, count):
    with pytest.raises(UserError, match="ask for a whole number of at least 1"):
        server.run(double, count)


def unpicklable(world):
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_one_message(ranks):
    with pytest.raises(RankFailure, match="result of unpicklable is a function, which cannot be pickled") as caught:
        ranks(unpicklable, 2)
    assert str(caught.value).count("cannot be pickled and so") == 1


@pytest.mark.parametrize(
    ("gpus", "asked", "local_size", "device", "backend"),
    [
        (0, "auto", 2, "cpu", "gloo"),
        (2, "auto", 2, "cuda:1", "nccl"),
        (1, "cuda", 1, "cuda:0", None),
        (1, "cuda", 2, "cpu", "gloo"),
        (1, "cuda:0", 2, "cuda:0", "gloo"),
        (8, "cpu", 2, "cpu", "gloo"),
    ],
)
def test_the_device_decides_the_backend(monkeypatch, gpus, asked, local_size, device, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen = choose_device(asked, local_size - 1, local_size)
    assert (str(chosen), choose_backend("auto", chosen, asked, local_size)) == (device, backend)


def test_more_ranks_than_gpus_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in range(3):
        choose_device("cuda", rank, 3)
    assert capsys.readouterr().err == "3 ranks and 1 GPU(s): running on CPU\n"


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="sees no GPU here; use device cpu"):
        choose_device("cuda", 0, 1)


# Ranks that raise, exit and die


def fail_differently(world):
    if world.rank == 3:
        return "fine"
    if world.rank == 0:
        raise KeyError("missing")
    torch.zeros(2) + torch.zeros(3)


def test_equal_errors_are_told_once(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(fail_differently, 4)
    error = caught.value
    assert (error.kind, error.ranks) == ("raised", (0, 1, 2))
    assert "rank 0 raised KeyError: 'missing'\n" in str(error)
    assert "ranks 1-2 raised RuntimeError: The size of tensor a (2)" in str(error)
    assert f"{__file__}:" in str(error) and "in fail_differently" in str(error)
    assert "launch/rank.py" not in error.tracebacks[0] and error.tracebacks[0].startswith("Traceback")
    assert any("[ranks 1-2] Traceback" in note for note in error.__notes__)


def refuse(world):
    raise UserError("pp=3 does not fit 2 ranks")


def test_a_user_error_of_the_ranks_is_raised_here(ranks):
    with pytest.raises(UserError, match="^pp=3 does not fit 2 ranks$"):
        ranks(refuse, 2)


def exit_with(world, code):
    print("before the end")
    dist.barrier()
    sys.exit(code)


def test_an_exit_code_is_told(server):
    with pytest.raises(RankFailure) as caught:
        server.run(exit_with, 2, (2,), deadline_s=DEADLINE_S)
    assert str(caught.value) == "ranks 0-1 died: exited with code 2"
    assert caught.value.output == ["before the end\n"] * 2


def test_exit_code_zero_is_a_return(ranks):
    assert ranks(exit_with, 2, 0) == [None, None]


def loop_for_ever(world, child):
    if child and world.rank == 0:
        KEPT.append(subprocess.Popen(["sleep", "1000"]))
        print(KEPT[0].pid, flush=True)
    while True:
        sum(range(1000))


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
    assert until(lambda: not job.poll(0.01) and all(job.pids) and job.output(0).endswith("\n"))
    assert until(lambda: all(board and board.state == "running" for board in job.boards()))
    pids, child = job.pids, int(job.output(0))
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankFailure) as caught:
        job.wait()
    assert caught.value.ranks == (0,)
    assert str(caught.value).startswith("rank 0 died: killed by SIGKILL\nmeanwhile\n  ranks 1-2: running")
    assert until(lambda: not any(map(alive, [*pids, child])))


def hold_the_interpreter(world):
    print("holding", flush=True)
    sum(range(10**15))  # one call into C, in which no other thread of this process can run


@needs_proc
def test_a_killed_server_takes_its_ranks_along_and_its_successor_has_one_thread(server, ranks):
    job = server.start(hold_the_interpreter, 2)
    assert until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "holding\n")
    pids = [*job.pids, server.pid]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="the rank server .* died, and all ranks with it"):
        job.wait()
    assert until(lambda: not any(map(alive, pids)))
    server.wait_until_ready()
    # Before its first fork: OpenBLAS would end its threads when the process forks.
    assert "Threads:\t1\n" in Path(f"/proc/{server.pid}/status").read_text()
    assert ranks(double, 2, 4) == [8, 8]


PARENT = """
import subprocess, sys
sys.path.insert(0, {root!r})
from minidist.train.launch import RankServer
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
        assert len(pids) == 5 and all(map(alive, pids))
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
    assert until(lambda: not any(map(alive, pids)))


@needs_proc
def test_an_interrupted_wait_leaves_no_rank(server):
    job = server.start(loop_for_ever, 2, (False,))
    assert until(lambda: not job.poll(0.01) and all(job.pids))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    signal.signal(signal.SIGALRM, before)
    assert not any(map(alive, job.pids))


# A job that its caller watches


def until_told(world):
    told = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    print("ready", flush=True)
    while not told:
        sum(range(1000))
    return f"saved by {world.rank}"


def test_a_forwarded_signal_lets_ranks_end_in_their_own_way(server):
    job = server.start(until_told, 2, deadline_s=DEADLINE_S)
    with forward_signals(job, signal.SIGTERM):
        assert until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "ready\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.wait().values == ["saved by 0", "saved by 1"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_running_job_shows_boards_and_stacks_and_can_be_killed(server):
    job = server.start(until_told, 2)
    assert until(lambda: not job.poll(0.01) and job.output(0) == job.output(1) == "ready\n")
    assert [board.state for board in job.boards()] == ["running", "running"]
    assert all("in until_told" in stack for stack in job.stacks().values())
    job.kill()
    assert job.done and job.poll()
    with pytest.raises(RankFailure, match="the job was killed"):
        job.wait()


def test_two_jobs_run_side_by_side(server):
    first = server.start(until_told, 1)
    assert server.run(double, 2, (3,), deadline_s=DEADLINE_S).values == [6, 6]
    first.kill()
