"""Live ranks: variables that stay, output by rank, and what is said about a cell that fails or hangs."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import alive, needs_proc, until

from minidist.comm.board import Board, Channel
from minidist.errors import UserError
from minidist.notebook import LiveRanks

LATER_S = 30.0  # a cell that should have been explained before fails as "deadline"


@pytest.fixture
def live(server):
    with LiveRanks(3, server=server) as live:
        yield live


def run(live: LiveRanks, source: str, **options):
    result = live.run(textwrap.dedent(source), **{"timeout_s": LATER_S, **options})
    assert result.kind != "deadline", str(result)
    assert len([*result.errors, *result.notes]) == 0 or len("\n".join(result.errors).splitlines()) < 15, str(result)
    return result


def works(live: LiveRanks) -> None:
    """The ranks talk to each other, through torch's calls and through the door."""
    result = run(
        live,
        """
        import minidist.comm
        t = torch.tensor([rank + 1.0])
        dist.all_reduce(t)
        minidist.comm.all_reduce(t, comm)
        t.item()
        """,
    )
    assert str(result) == "ranks 0-2: 18.0"


def test_variables_stay_and_the_last_expression_is_shown(live):
    assert str(run(live, "x = 10 * rank")) == ""
    assert str(run(live, "x + 1")) == "rank 0: 1\nrank 1: 11\nrank 2: 21"
    assert str(run(live, "x + 1;")) == ""
    assert str(run(live, "_")) == "rank 0: 1\nrank 1: 11\nrank 2: 21"
    assert live.get("x") == [0, 10, 20]


def test_the_namespace_starts_with_what_a_cell_needs(live):
    result = run(live, "world.rank == rank, world.size == world_size == comm.size == dist.get_world_size(), torch.pi")
    assert str(result) == "ranks 0-2: (True, True, 3.141592653589793)"
    works(live)


def test_equal_outputs_are_merged_and_stay_in_rank_order(live):
    result = run(live, "print('same' if rank != 1 else 'other')")
    assert str(result) == "ranks 0, 2: same\nrank 1: other"
    result = run(live, "print('two')\nprint('lines')\nrank // 2")
    assert str(result) == "ranks 0-1:\n  two\n  lines\n  0\nrank 2:\n  two\n  lines\n  1"
    assert result.outputs == ["two\nlines\n"] * 3 and result.shown == ["0", "0", "1"]


def test_output_belongs_to_the_cell_that_printed_it(live):
    for cell in range(3):
        assert run(live, f"print({cell})").outputs == [f"{cell}\n"] * 3


def test_a_cell_may_define_classes_that_other_ranks_receive(live):
    run(live, "class Box:\n    def __init__(self, n):\n        self.n = n")
    result = run(live, "boxes = [None] * 3\ndist.all_gather_object(boxes, Box(rank))\n[box.n for box in boxes]")
    assert str(result) == "ranks 0-2: [0, 1, 2]"


def test_an_error_is_one_short_message_with_the_line_of_the_cell(live):
    result = run(live, "a = 1\nb = missing + a", name=7, first_line=2)
    assert not result.ok and result.notes == []
    expected = "ranks 0-2 raised NameError: name 'missing' is not defined\n  line 3 of the cell: b = missing + a"
    assert str(result) == expected
    assert str(run(live, "a")) == "ranks 0-2: 1"


def test_different_errors_are_told_apart(live):
    result = run(live, "if rank == 1:\n    raise ValueError('odd')\n1 / 0")
    assert result.errors == [
        "ranks 0, 2 raised ZeroDivisionError: division by zero\n  line 3 of the cell: 1 / 0",
        "rank 1 raised ValueError: odd\n  line 2 of the cell: raise ValueError('odd')",
    ]


@pytest.mark.parametrize("source", ["def f(:\n    pass", "x = 1\n  y = 2", "f(1"])
def test_a_syntax_error_names_its_line(live, source):
    result = run(live, source)
    assert result.kind == "error" and len(result.errors) == 1
    assert "Error: " in str(result) and "of the cell" in str(result) and "Traceback" not in str(result)


def test_an_error_inside_the_package_names_both_places(live):
    result = run(live, "from minidist.data.partition import block\nblock(-1, 2, 0)")
    assert "line 2 of the cell: block(-1, 2, 0)" in str(result)
    assert "raised at data/partition.py:" in str(result)


def test_leaving_the_interpreter_is_an_error_like_others(live):
    pids = list(live.pids)
    assert "raised SystemExit: 3" in str(run(live, "import sys\nsys.exit(3)"))
    works(live)
    assert live.pids == pids


def test_groups_survive_an_error_that_concerns_no_operation(live):
    run(live, "mine = dist.new_group()\ndist.all_reduce(torch.ones(1), group=mine)")
    assert run(live, "misspelt").notes == []
    assert str(run(live, "t = torch.ones(1)\ndist.all_reduce(t, group=mine)\nt.item()")) == "ranks 0-2: 3.0"


def test_a_skipped_all_reduce_is_explained_and_variables_stay(live):
    run(live, "x = rank + 5")
    pids = list(live.pids)
    result = run(live, "t = torch.ones(4)\nif rank != 1:\n    dist.all_reduce(t)\nprint('here')", name=3)
    assert result.kind == "deadlock"
    where = "waiting in all_reduce #1 (4,) float32 of 'world' (ranks 0-2) at line 3 of cell 3"
    assert f"ranks 0, 2: {where}" in str(result)
    assert "rank 1 reached the end of the cell without launching all_reduce #1" in str(result)
    assert result.outputs == ["", "here\n", ""]
    assert "keep their variables" in result.notes[0]
    assert str(run(live, "x")) == "rank 0: 5\nrank 1: 6\nrank 2: 7"
    works(live)
    assert live.pids == pids


def test_sends_head_to_head_are_explained_and_variables_stay(live):
    run(live, "x = rank")
    source = "t = torch.ones(10)\nif rank < 2:\n    dist.send(t, 1 - rank)\n    dist.recv(t, 1 - rank)"
    result = run(live, source)
    assert result.kind == "deadlock"
    assert "rank 0: waiting in send to rank 1 #1 (10,) float32" in str(result)
    assert "rank 1 waits for rank 0 to launch recv #1" in str(result)
    assert "at line 3 of cell 2" in str(result)
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_a_wait_at_the_door_can_be_given_up_too(live):
    run(live, "x = rank\nimport minidist.comm")
    result = run(live, "if rank:\n    minidist.comm.barrier(comm)")
    assert result.kind == "deadlock" and "waiting in barrier" in str(result) and "line 2 of cell 2" in str(result)
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_a_wait_inside_the_package_is_told_with_the_line_of_the_cell(live):
    result = run(live, "from minidist.comm import exchange\n\nif rank:\n    exchange([1], comm)")
    assert result.kind in ("deadlock", "error")
    works(live)


def test_ranks_that_wait_for_one_that_raised_are_told_with_its_error(live):
    result = run(live, "x = rank\nif rank == 1:\n    raise ValueError('no more')\ndist.barrier()")
    assert result.kind == "error"
    assert result.errors[0].startswith("rank 1 raised ValueError: no more\n  line 3 of the cell")
    assert "ranks 0, 2: waiting in barrier #1" in result.errors[1] and len(result.errors) == 2
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_operations_that_do_not_fit_are_a_mismatch(live):
    result = run(live, "dist.all_reduce(torch.ones(2 + rank))")
    assert "mismatch: operation #1 of 'world' (ranks 0-2) is not the same on ranks" in str(result)
    works(live)


@pytest.mark.parametrize("loop", ["while True:\n    pass", "import time\ntime.sleep(1000)"], ids=["busy", "asleep"])
def test_an_endless_loop_is_stopped_and_told_by_its_line(live, loop):
    run(live, "x = rank")
    result = run(live, loop, quiet_s=0.3)
    assert result.kind == "quiet" and "nothing has moved for 0.3 s" in str(result)
    assert "of cell 2" in str(result)
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_a_cell_that_works_on_is_not_taken_for_a_loop(live):
    source = "import time\nend = time.monotonic() + 0.8\nwhile time.monotonic() < end:\n    print('.')\n'done'"
    assert run(live, source, quiet_s=0.4).shown == ["'done'"] * 3


def test_a_wait_of_torch_itself_tells_what_was_not_begun(live):
    source = """
    x = rank
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if rank != 1:
        loss.backward()
    """
    result = run(live, source, quiet_s=0.5)
    assert result.kind == "quiet" and "ranks 0, 2: line 6 of cell 1" in str(result)
    assert "all_reduce (12,) float32 #" in str(result)
    assert "begun by ranks 0, 2, not by rank 1" in str(result)
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_a_cell_that_closes_the_process_group_gets_a_new_one(live):
    result = run(live, "x = rank\ndist.destroy_process_group()")
    assert result.ok and "new process group" in result.notes[0]
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_long_output_is_cut(live):
    text = str(run(live, "for i in range(5000):\n    print(i)"))
    assert "... in all 5000 lines" in text and len(text.splitlines()) < 210


def test_a_cell_has_a_deadline_if_one_is_given(live):
    result = live.run("while True:\n    print(end='.')", timeout_s=0.3)
    assert result.kind == "deadline" and "not done after 0.3 s" in str(result)
    works(live)


def test_a_rank_server_that_dies_is_replaced():
    with LiveRanks(3) as live:
        run(live, "x = rank")
        os.kill(live._server.pid, signal.SIGKILL)
        assert until(lambda: live._job.poll() or live._job.died)
        (note,) = run(live, "rank").notes
        assert "died, and all ranks with it. All ranks were restarted" in note
        works(live)


def test_ranks_that_hear_nothing_are_restarted(live):
    run(live, "x = rank")
    deaf = "import signal\nif rank == 2:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"
    result = run(live, deaf, quiet_s=0.3)
    assert "rank 2 could not be stopped" in str(result)
    assert "the variables of ranks 0-2 are gone" in str(result)
    assert "name 'x' is not defined" in str(run(live, "x"))
    works(live)


def test_a_rank_that_dies_takes_the_variables_along_and_is_named(live):
    run(live, "x = rank")
    result = run(live, "import os\nif rank == 2:\n    os._exit(7)\ndist.barrier()")
    assert result.kind == "died"
    assert "rank 2 died: exited with code 7" in str(result)
    assert "ranks 0-1: waiting in barrier #1" in str(result)
    assert "the variables of ranks 0-2 are gone" in str(result)
    works(live)


def test_a_crash_is_told_by_its_signal(live):
    result = run(live, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else None")
    assert "rank 1 died: killed by SIGSEGV" in str(result)
    works(live)


def test_a_rank_killed_between_cells_is_noticed_by_the_next(live):
    os.kill(live.pids[1], signal.SIGKILL)
    assert until(lambda: live._job.poll() or live._job.died)
    result = run(live, "rank")
    assert result.notes == [
        "rank 1 died: killed by SIGKILL. All ranks were restarted: the variables of ranks 0-2 are gone."
    ]
    assert result.shown == ["0", "1", "2"]


def test_stop_frees_the_ranks_and_says_where_they_stood(live):
    run(live, "x = rank")
    stop = f"import os, signal\nif rank == 0:\n    os.kill({os.getpid()}, signal.SIGINT)\nwhile True:\n    pass"
    result = run(live, stop)
    assert result.kind == "stopped" and "stopped; the ranks stood here:" in str(result)
    assert live.get("x") == [0, 1, 2]
    works(live)


def test_a_flood_of_output_is_stopped(live):
    result = run(live, "while True:\n    print('x' * 100_000)")
    assert result.kind == "flood" and len(str(result)) < 40_000
    works(live)


def test_a_value_that_cannot_travel_is_an_error_and_a_missing_one_too(live):
    with pytest.raises(UserError, match="nothing_there"):
        live.get("nothing_there")
    with pytest.raises(UserError, match="ickle"):
        live.get("lambda: 1")
    works(live)


def test_one_rank_is_a_world_too(server):
    with LiveRanks(1, server=server) as live:
        assert str(run(live, "t = torch.ones(2)\ndist.all_reduce(t)\nt.sum().item()")) == "rank 0: 2.0"


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_world_without_ranks_is_refused(server, n):
    with pytest.raises(UserError, match="ranks were asked for"):
        LiveRanks(n, server=server)


def test_the_records_of_a_cell_are_of_this_cell(live):
    run(live, "dist.all_reduce(torch.ones(8))")
    result = run(live, "dist.broadcast(torch.ones(2), 1)")
    assert [[r.name for r in rows] for rows in result.records] == [["broadcast"]] * 3
    assert [rows[0].seq for rows in result.records] == [2, 2, 2]


KERNEL = """
import os, signal
from minidist.notebook import LiveRanks
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
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
    )
    pids = [int(word) for word in ran.stdout.split()]
    assert ran.returncode == -signal.SIGKILL and len(pids) == 2, ran.stderr
    assert until(lambda: not any(map(alive, pids)))


def test_a_cleared_board_counts_from_one_again():
    board, channel = Board(), Channel("collective", "world", (0, 1))
    board.launch(channel, "barrier", (0,), "float32")
    board.wait(channel, 1, "barrier", (0,), "float32", "cell 1:1")
    before = board.snapshot()
    board.clear()
    after = board.snapshot()
    assert before.progress and not after.progress and after.channel is None
    assert after.state == "running" and after.version > before.version
    assert board.launch(channel, "barrier", (0,), "float32") == 1
