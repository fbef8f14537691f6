"""`python -m exercises parity`: the trainer's layouts with a learner's code in them, each compared with one process."""

import pytest

from exercises.__main__ import main
from exercises.catalogue import Catalogue
from exercises.learner_pieces import LearnerPiece
from exercises.parity import choose_cases, run_parity
from exercises.work import Work
from minidist.errors import UserError

CATALOGUE = Catalogue()


def piece(name: str, old: str = "", new: str = "") -> LearnerPiece:
    """The solution of an exercise with some text replaced."""
    exercise = CATALOGUE[name]
    text = exercise.solution.read_text()
    assert old in text
    return LearnerPiece(name, exercise.pieces, "mine.py", text.replace(old, new) if old else text)


def run_case(server, name: str, old: str = "", new: str = "") -> dict | str:
    [(_, row)] = run_parity([piece(name, old, new)], choose_cases(CATALOGUE[name], 2, max_cases=1), server)
    return row


@pytest.mark.parametrize("name", ["block_partition", "token_count", "zero_stage_three"])
def test_solutions_equal_one_process(server, name):
    assert run_case(server, name)["ok"]


def test_a_wrong_piece_is_found_by_its_first_wrong_value(server):
    row = run_case(server, "token_count", "return count.item()", "return count.item() / 2")
    assert not row["ok"] and row["first_wrong"].startswith("step 0")


def test_a_piece_that_fails_is_named_with_its_line(server):
    row = run_case(server, "block_partition", "return", "raise ArithmeticError; return")
    assert "ArithmeticError" in row and "mine.py" in row


def test_layouts_that_do_not_call_the_piece_are_not_run():
    cases = choose_cases(CATALOGUE["zero_stage_two"], 2)
    assert cases and {(case.engine, case.gradients) for case in cases} == {("simple", "zero2"), ("simple", "zero3")}


def test_a_piece_that_no_run_calls_is_refused_with_the_reason():
    with pytest.raises(UserError, match="no training run calls strided_partition, .*: the loader cuts"):
        choose_cases(CATALOGUE["strided_partition"], 2)


def test_the_command_prints_a_row_per_layout(tmp_path, capsys):
    work, exercise = Work(tmp_path / "work"), CATALOGUE["block_partition"]
    work.update(CATALOGUE)
    work.file(exercise).write_text(exercise.solution.read_text())
    work.record(exercise, True, exercise.points, work.file(exercise).read_bytes())
    assert main(["--work", str(work.folder), "parity"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("block_partition: ") and all(line.startswith("  ") for line in told[1:-1])
    assert told[-1] == "every layout equals one process"
