"""`python -m exercises parity`: the trainer's layouts with a learner's code in them, each compared with one process."""

import pytest

from exercises import parity_gate
from exercises.__main__ import main
from exercises.answers import Answer, Answers, Edit
from exercises.catalogue import Catalogue
from exercises.layouts import read_layouts, read_resumed
from exercises.learner_pieces import LearnerPiece
from exercises.parity import choose_cases, run_parity
from exercises.parity_gate import WITHOUT_EFFECT, judge_in_trainer, run_parity_gate
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


def test_the_gate_runs_right_answers_in_the_trainer_and_finds_a_wrong_one(server, capsys):
    assert run_parity_gate([CATALOGUE["zero_stage_two"]], server)
    told = capsys.readouterr().out
    assert "zero_stage_two              green dp=2 zero2" in told and "3 right answers, refuses wrong_" in told


QUICK = ("tree_broadcast",)  # besides zero_stage_two, above


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
        for name in sorted(set().union(*read_layouts().values(), read_resumed()) - {"zero_stage_two"})
    ],
)
def test_right_answers_equal_one_process_in_a_layout_that_refuses_a_wrong_one(server, name):
    result = judge_in_trainer(CATALOGUE[name], server)
    assert not result.problems and not result.reason
    assert result.right > 2 and bool(result.refused) == (name not in WITHOUT_EFFECT)


def test_the_gate_is_red_if_a_right_answer_is_not_or_if_no_wrong_answer_is_noticed(server, monkeypatch):
    exercise = CATALOGUE["token_count"]
    right, wrong = Answer("right_half", of="wrong"), Answer("wrong_solution", edits=(Edit("a", "b"),))
    answers = Answers(exercise.answers, {each.name: each for each in (right, wrong)}, {})
    solution = exercise.solution.read_text()
    texts = {right.name: solution.replace("return count.item()", "return count.item() / 2"), wrong.name: solution}
    monkeypatch.setattr(parity_gate, "read_answers", lambda exercise: answers)
    monkeypatch.setattr(parity_gate, "read_layouts", lambda root: {"naive": (exercise.name,)})
    monkeypatch.setattr(parity_gate.stubs, "generate_answer", lambda exercise, name: texts[name])
    problems = judge_in_trainer(exercise, server).problems
    assert len(problems) == 2
    assert problems[0].startswith("token_count: wrong_solution equal one process in dp=2")
    assert (
        problems[1].startswith("token_count: right_half is right and differs from one process")
        and "step 0" in problems[1]
    )


def test_the_gate_says_why_an_exercise_is_not_run_in_the_trainer(server, capsys):
    with pytest.raises(UserError, match="no training run calls these exercises"):
        run_parity_gate([CATALOGUE["strided_partition"]], server)
    assert "not run: no training run calls strided_partition" in capsys.readouterr().out
