"""Live ranks whose cells hang, die or use all memory: the report, and that the next cell works."""

import os
import signal
import sys
from pathlib import Path

import pytest

from minidist.comm.status import Channel
from minidist.tools.deadlock.status_page import StatusPage
from minidist.tools.notebook import LiveRanks
from tests.helpers.cells import CELL_DEADLINE_S, assert_ranks_communicate, run_cell
from tests.helpers.processes import is_alive, needs_proc, wait_until
from tests.helpers.warm_python import warm_python

pytestmark = pytest.mark.process_lifecycle


@pytest.fixture
def live(server):
    with LiveRanks(3, server=server) as live:
        yield live


def test_a_skipped_all_reduce_is_explained_and_variables_stay(live):
    run_cell(live, "x = rank + 5")
    pids = list(live.pids)
    result = run_cell(live, "t = torch.ones(4)\nif rank != 1:\n    dist.all_reduce(t)\nprint('here')", name=3)
    assert result.kind == "deadlock"
    where = "waiting in all_reduce #1 (4,) float32 of 'world' (ranks 0-2) at line 3 of the cell"
    assert f"ranks 0, 2: {where}" in str(result)
    assert "rank 1 reached the end of the cell without launching all_reduce #1" in str(result)
    assert result.outputs == ["", "here\n", ""]
    assert "keep their variables" in result.notes[0]
    assert str(run_cell(live, "x")) == "rank 0: 5\nrank 1: 6\nrank 2: 7"
    assert_ranks_communicate(live)
    assert live.pids == pids


def test_sends_head_to_head_are_explained_and_variables_stay(live):
    run_cell(live, "x = rank")
    source = "t = torch.ones(10)\nif rank < 2:\n    dist.send(t, 1 - rank)\n    dist.recv(t, 1 - rank)"
    result = run_cell(live, source)
    assert result.kind == "deadlock"
    assert "rank 0: waiting in send to rank 1 #1 (10,) float32" in str(result)
    assert "rank 1 waits for rank 0 to launch recv #1" in str(result)
    assert "at line 3 of the cell" in str(result)
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_a_wait_in_a_collective_can_be_interrupted(live):
    run_cell(live, "x = rank\nimport minidist.comm")
    result = run_cell(live, "if rank:\n    minidist.comm.barrier(comm)")
    assert result.kind == "deadlock" and "waiting in barrier" in str(result) and "line 2 of the cell" in str(result)
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_a_wait_inside_the_package_is_reported_with_the_line_of_the_cell(live):
    result = run_cell(live, "from minidist.comm import all_gather_object\n\nif rank:\n    all_gather_object([1], comm)")
    assert result.kind in ("deadlock", "error")
    assert_ranks_communicate(live)


def test_ranks_that_wait_for_one_that_raised_are_reported_with_its_error(live):
    result = run_cell(live, "x = rank\nif rank == 1:\n    raise ValueError('no more')\ndist.barrier()")
    assert result.kind == "error"
    assert result.errors[0].startswith("rank 1 raised ValueError: no more\n  line 3 of the cell")
    assert "ranks 0, 2: waiting in barrier #1" in result.errors[1] and len(result.errors) == 2
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_a_wait_in_a_function_of_an_earlier_cell_names_that_cell(live):
    run_cell(live, "def meet():\n    dist.barrier()")
    assert "waiting in barrier #1 of 'world' (ranks 0-2) at line 2 of cell 1" in str(
        run_cell(live, "if rank == 0:\n    meet()")
    )
    assert_ranks_communicate(live)


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(2 + rank))",
        "dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        "dist.reduce_scatter(torch.ones(1), list(torch.ones(3, 1)), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
    ],
    ids=["shape", "how all_reduce reduces", "how reduce_scatter reduces"],
)
def test_mismatched_operations_are_explained(live, call):
    result = run_cell(live, call)
    assert "mismatch: operation #1 of 'world' (ranks 0-2) is not the same on ranks" in str(result)
    assert_ranks_communicate(live)


@pytest.mark.parametrize("loop", ["while True:\n    pass", "import time\ntime.sleep(1000)"], ids=["busy", "asleep"])
def test_an_endless_loop_is_stopped_and_reported_with_its_line(live, loop):
    run_cell(live, "x = rank")
    result = run_cell(live, loop, quiet_s=0.3)
    assert result.kind == "quiet" and "nothing has moved for 0.3 s" in str(result)
    assert " of the cell" in str(result)
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_a_wait_inside_torch_names_the_missing_operation(live):
    source = """
    x = rank
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if rank != 1:
        loss.backward()
    """
    result = run_cell(live, source, quiet_s=CELL_DEADLINE_S)
    assert result.kind == "deadlock" and "ranks 0, 2: line 6 of the cell" in str(result)
    assert "every rank waits inside torch or has reached the end" in str(result)
    assert "all_reduce (12,) float32 #" in str(result)
    assert "begun by ranks 0, 2, not by rank 1" in str(result)
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_groups_that_take_long_to_end_are_no_deadlock(live):
    """gloo sleeps for each connection that a group closes: with many, for longer than a deadlock report takes."""
    make = "groups = bind(world, Mesh(dp=3), [GroupSpec(str(i), ('dp',)) for i in range(50)])"
    run_cell(live, f"from minidist.comm import GroupSpec, bind\nfrom minidist.mesh import Mesh\n{make}")
    assert run_cell(live, "groups.destroy()").kind == "done"
    assert_ranks_communicate(live)


def test_a_group_that_one_rank_does_not_make_is_reported(live):
    result = run_cell(live, "if rank != 1:\n    dist.new_group()", quiet_s=CELL_DEADLINE_S)
    assert result.kind == "deadlock" and "line 2 of the cell" in str(result)
    assert "the variables of ranks 0-2 are gone" in str(result)  # such a wait cannot be ended from outside
    assert_ranks_communicate(live)


def test_ranks_that_wait_for_one_that_sleeps_or_computes_are_left_alone(live):
    source = """
    import time
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if rank == 1:
        time.sleep(1.2)
    end = time.monotonic() + 1.2
    while rank == 2 and time.monotonic() < end:
        pass
    loss.backward()
    'done'
    """
    assert run_cell(live, source).shown == ["'done'"] * 3


def test_a_cell_has_a_deadline_if_one_is_given(live):
    result = live.run("while True:\n    print(end='.')", timeout_s=0.3)
    assert result.kind == "deadline" and "not done after 0.3 s" in str(result)
    assert_ranks_communicate(live)


def test_a_rank_server_that_dies_is_replaced():
    with LiveRanks(3) as live:
        run_cell(live, "x = rank")
        os.kill(live._server.pid, signal.SIGKILL)
        assert wait_until(lambda: live._job.poll() or live._job.dead_ranks)
        (note,) = run_cell(live, "rank").notes
        assert "died, and all ranks with it. All ranks were restarted" in note
        assert_ranks_communicate(live)


def test_a_rank_server_is_replaced_before_its_end_can_be_waited_for(monkeypatch):
    with LiveRanks(2) as live:
        run_cell(live, "x = rank")
        dead = live._server._process
        os.kill(dead.pid, signal.SIGKILL)
        monkeypatch.setattr(dead, "poll", lambda: None)  # its sockets close first: for a moment it still seems to live
        assert wait_until(lambda: live._job.poll() or live._job.dead_ranks)
        assert "All ranks were restarted" in run_cell(live, "rank").notes[0]
        assert_ranks_communicate(live)


def test_ranks_that_do_not_answer_are_restarted(live):
    run_cell(live, "x = rank")
    deaf = "import signal\nif rank == 2:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"
    result = run_cell(live, deaf, quiet_s=0.3)
    assert "rank 2 could not be stopped" in str(result)
    assert "the variables of ranks 0-2 are gone" in str(result)
    assert "name 'x' is not defined" in str(run_cell(live, "x"))
    assert_ranks_communicate(live)


def test_a_rank_that_dies_takes_the_variables_along_and_is_named(live):
    run_cell(live, "x = rank")
    result = run_cell(live, "import os\nif rank == 2:\n    os._exit(7)\ndist.barrier()")
    assert result.kind == "died"
    assert "rank 2 died: exited with code 7" in str(result)
    assert "ranks 0-1: waiting in barrier #1" in str(result)
    assert "the variables of ranks 0-2 are gone" in str(result)
    assert_ranks_communicate(live)


def test_a_crash_is_reported_by_its_signal(live):
    result = run_cell(live, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else None")
    died = (
        'rank 1 died: killed by SIGSEGV\n  Python stack, innermost call first:\n    File "cell 1", line 2 in <module>\n'
    )
    assert f"{died}meanwhile\n" in str(result)
    assert_ranks_communicate(live)


def test_a_rank_killed_between_cells_is_noticed_by_the_next(live):
    os.kill(live.pids[1], signal.SIGKILL)
    assert wait_until(lambda: live._job.poll() or live._job.dead_ranks)
    result = run_cell(live, "rank")
    assert result.notes == [
        "rank 1 died: killed by SIGKILL. All ranks were restarted: the variables of ranks 0-2 are gone."
    ]
    assert result.shown == ["0", "1", "2"]


def test_stop_frees_the_ranks_and_says_where_they_stood(live):
    run_cell(live, "x = rank")
    stop = f"import os, signal\nif rank == 0:\n    os.kill({os.getpid()}, signal.SIGINT)\nwhile True:\n    pass"
    result = run_cell(live, stop)
    assert result.kind == "stopped" and "stopped; the ranks stood here:" in str(result)
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_a_flood_of_output_is_stopped(live):
    result = run_cell(live, "while True:\n    print('x' * 100_000)")
    assert result.kind == "flood" and len(str(result)) < 40_000
    assert_ranks_communicate(live)


KERNEL = """
import os, signal
from minidist.tools.notebook import LiveRanks
if __name__ == "__main__":
    live = LiveRanks(2)
    live.run("x = 1")
    print(*live.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
def test_ranks_die_with_the_kernel(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = warm_python.run([sys.executable, str(script)], timeout=240, env=environ)
    pids = [int(word) for word in result.stdout.split()]
    assert result.returncode == -signal.SIGKILL and len(pids) == 2, result.stderr
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_a_cleared_status_page_counts_from_one_again():
    page, channel = StatusPage(), Channel("collective", "world", (0, 1))
    page.on_launch(channel, "barrier", (0,), "float32")
    page.on_wait(channel, 1, "barrier", (0,), "float32", "cell 1:1")
    before = page.take_snapshot()
    page.reset_channels()
    after = page.take_snapshot()
    assert before.progress_by_channel and not after.progress_by_channel and after.wait_channel is None
    assert after.state == "running" and after.version > before.version
    assert page.on_launch(channel, "barrier", (0,), "float32") == 1


TAKES_ALL = {
    "blocks": "kept = []\nwhile True:\n    kept.append(torch.ones(4 << 20))",
    "small": "kept = []\nwhile True:\n    kept.append([0] * 1000)",
    "at once": "kept = torch.empty(1 << 50)",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits address space")
@pytest.mark.parametrize("source", TAKES_ALL.values(), ids=TAKES_ALL)
def test_a_cell_that_takes_all_memory_ends_and_leaves_the_variables(server, source):
    with LiveRanks(2, server=server, memory_gib=0.125) as live:
        run_cell(live, "x = rank")
        result = run_cell(live, source, quiet_s=30.0)
        assert "ranks 0-1 raised MemoryError: more than the 0.1 GiB that this rank may take" in result.errors[0]
        assert "line 1 of the cell" in str(result) or "line 3 of the cell" in str(result)
        assert run_cell(live, "del kept\nx" if "[]" in source else "x").shown == ["0", "1"]
        assert run_cell(live, "len(torch.ones(8 << 20))").shown == [str(8 << 20)] * 2
        assert_ranks_communicate(live)
