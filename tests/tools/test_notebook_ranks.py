"""Live ranks of a notebook: variables between cells, output by rank, and errors."""

import pytest

from minidist.errors import UserError
from minidist.tools.notebook import LiveRanks
from minidist.tools.notebook.result import format_latest_output
from tests.helpers.cells import assert_ranks_communicate, run_cell


@pytest.fixture
def live(server):
    with LiveRanks(3, server=server) as live:
        yield live


def test_variables_stay_and_the_last_expression_is_shown(live):
    assert str(run_cell(live, "x = 10 * rank")) == ""
    assert str(run_cell(live, "x + 1")) == "rank 0: 1\nrank 1: 11\nrank 2: 21"
    assert str(run_cell(live, "x + 1;")) == ""
    assert str(run_cell(live, "_")) == "rank 0: 1\nrank 1: 11\nrank 2: 21"
    assert live.get("x") == [0, 10, 20]


def test_the_namespace_starts_with_what_a_cell_needs(live):
    result = run_cell(
        live, "world.rank == rank, world.size == world_size == comm.size == dist.get_world_size(), torch.pi"
    )
    assert str(result) == "ranks 0-2: (True, True, 3.141592653589793)"
    assert_ranks_communicate(live)


def test_equal_outputs_are_merged_and_stay_in_rank_order(live):
    result = run_cell(live, "print('same' if rank != 1 else 'other')")
    assert str(result) == "ranks 0, 2: same\nrank 1: other"
    result = run_cell(live, "print('two')\nprint('lines')\nrank // 2")
    assert str(result) == "ranks 0-1:\n  two\n  lines\n  0\nrank 2:\n  two\n  lines\n  1"
    assert result.outputs == ["two\nlines\n"] * 3 and result.shown == ["0", "0", "1"]


def test_output_belongs_to_the_cell_that_printed_it(live):
    for cell in range(3):
        assert run_cell(live, f"print({cell})").outputs == [f"{cell}\n"] * 3


def test_a_cell_may_define_classes_that_other_ranks_receive(live):
    run_cell(live, "class Box:\n    def __init__(self, n):\n        self.n = n")
    result = run_cell(live, "boxes = [None] * 3\ndist.all_gather_object(boxes, Box(rank))\n[box.n for box in boxes]")
    assert str(result) == "ranks 0-2: [0, 1, 2]"


def test_an_error_is_one_short_message_with_the_line_of_the_cell(live):
    result = run_cell(live, "a = 1\nb = missing + a", name=7, first_line=2)
    assert not result.ok and result.notes == []
    expected = "ranks 0-2 raised NameError: name 'missing' is not defined\n  line 3 of the cell: b = missing + a"
    assert str(result) == expected
    assert str(run_cell(live, "a")) == "ranks 0-2: 1"


def test_different_errors_are_reported_apart(live):
    result = run_cell(live, "if rank == 1:\n    raise ValueError('odd')\n1 / 0")
    assert result.errors == [
        "ranks 0, 2 raised ZeroDivisionError: division by zero\n  line 3 of the cell: 1 / 0",
        "rank 1 raised ValueError: odd\n  line 2 of the cell: raise ValueError('odd')",
    ]


@pytest.mark.parametrize("source", ["def f(:\n    pass", "x = 1\n  y = 2", "f(1"])
def test_a_syntax_error_names_its_line(live, source):
    result = run_cell(live, source)
    assert result.kind == "error" and len(result.errors) == 1
    assert "Error: " in str(result) and "of the cell" in str(result) and "Traceback" not in str(result)


def test_an_error_inside_the_package_names_both_places(live):
    result = run_cell(live, "from minidist.data.partition import block_partition\nblock_partition(-1, 2, 0)")
    assert "line 2 of the cell: block_partition(-1, 2, 0)" in str(result)
    assert "raised at data/partition.py:" in str(result)


def test_a_breakpoint_prints_the_variables_of_each_rank_and_goes_on(live):
    source = """
    from pathlib import Path
    big, small = torch.zeros(3, 4), [rank]
    def double(value):
        result = 2 * value
        breakpoint()
        return result
    y = double(rank)
    breakpoint(header="ignored")
    """
    printed = str(run_cell(live, source)).splitlines()
    assert printed[printed.index("rank 1:") :][:9] == [
        "rank 1:",
        "  breakpoint() at line 6 of the cell, in double (a rank prints its variables and goes on):",
        "    value = 1",
        "    result = 2",
        "  breakpoint() at line 9 of the cell (a rank prints its variables and goes on):",
        "    big = tensor of shape (3, 4), float32",
        "    small = [1]",
        "    y = 2",
        "rank 2:",
    ]


def test_leaving_the_interpreter_is_an_error_like_others(live):
    pids = list(live.pids)
    assert "raised SystemExit: 3" in str(run_cell(live, "import sys\nsys.exit(3)"))
    assert_ranks_communicate(live)
    assert live.pids == pids


def test_groups_survive_an_error_that_concerns_no_operation(live):
    run_cell(live, "mine = dist.new_group()\ndist.all_reduce(torch.ones(1), group=mine)")
    assert run_cell(live, "misspelt").notes == []
    assert str(run_cell(live, "t = torch.ones(1)\ndist.all_reduce(t, group=mine)\nt.item()")) == "ranks 0-2: 3.0"


def test_a_cell_that_works_on_is_not_taken_for_a_loop(live):
    source = "import time\nend = time.monotonic() + 0.8\nwhile time.monotonic() < end:\n    print('.')\n'done'"
    assert run_cell(live, source, quiet_s=0.4).shown == ["'done'"] * 3


def test_a_cell_that_closes_the_process_group_gets_a_new_one(live):
    result = run_cell(live, "x = rank\ndist.destroy_process_group()")
    assert result.ok and "new process group" in result.notes[0]
    assert live.get("x") == [0, 1, 2]
    assert_ranks_communicate(live)


def test_long_output_is_cut(live):
    text = str(run_cell(live, "for i in range(5000):\n    print(i)"))
    assert "... in all 5000 lines" in text and len(text.splitlines()) < 210


def test_unpicklable_and_missing_values_are_errors(live):
    with pytest.raises(UserError, match="nothing_there"):
        live.get("nothing_there")
    with pytest.raises(UserError, match="ickle"):
        live.get("lambda: 1")
    assert_ranks_communicate(live)


def test_one_rank_is_a_world_too(server):
    with LiveRanks(1, server=server) as live:
        assert str(run_cell(live, "t = torch.ones(2)\ndist.all_reduce(t)\nt.sum().item()")) == "rank 0: 2.0"


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_world_without_ranks_is_refused(server, n):
    with pytest.raises(UserError, match="the number of ranks is"):
        LiveRanks(n, server=server)


def test_the_records_of_a_cell_are_of_this_cell(live):
    run_cell(live, "dist.all_reduce(torch.ones(8))")
    result = run_cell(live, "dist.broadcast(torch.ones(2), 1)")
    assert [[r.name for r in rows] for rows in result.records] == [["broadcast"]] * 3
    assert [rows[0].seq for rows in result.records] == [2, 2, 2]


def test_what_ranks_print_is_seen_while_the_cell_runs(live, tmp_path):
    """The ranks continue only after their output was seen, so the test does not depend on timing."""
    seen, go = [], tmp_path / "go"

    def show(text):
        seen.append(text)
        if "step 1" in text:
            go.touch()

    source = f"""
    from pathlib import Path
    print("step 0")
    print("step 1" if rank else "step one")
    while not Path({str(go)!r}).exists():
        pass
    print("step 2")
    """
    result = run_cell(live, source, show=show)
    assert seen[-1] == "rank 0:\n  step 0\n  step one\nranks 1-2:\n  step 0\n  step 1"
    assert str(result) == "rank 0:\n  step 0\n  step one\n  step 2\nranks 1-2:\n  step 0\n  step 1\n  step 2"


def test_the_end_of_a_long_output_is_shown_while_the_cell_runs():
    told = format_latest_output(["".join(f"line {i}\n" for i in range(1000)), ""])
    assert told.splitlines()[0] == "rank 0:" and told.endswith("  line 998\n  line 999")
    assert len(told.splitlines()) < 15
