"""The gate passes for the course as it is, and fails for every kind of defect."""

import json
import re
import shutil

import pytest

from exercises import check, report, stubs
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.gate import Gate
from exercises.testing import Finding
from tests.helpers.exhaustive import exhaustive

CHAPTERS = ("ch00_first_run", "ch01_data_distribution")
WRONG = [answer.name for answer in read_answers(Catalogue()["block_partition"]).wrong]
KEPT = {
    "wrong_zero",
    "wrong_constant",
    "wrong_cheat",
    "wrong_cheat_alias",
    "wrong_ceiling",
    "wrong_list",
    "wrong_one_rank",
}
FOLDERS = [f"{folder}/{chapter}" for folder in ("exercises", "solutions") for chapter in CHAPTERS]


def tables(exercise) -> list[str]:
    """The file of answers, cut before each of its tables."""
    return re.split(r"(?m)^(?=\[(?:right|wrong)\.\w+\]$|\[\[equivalent\]\]$)", exercise.answers.read_text())


def remove(exercise, *names):
    """Take these answers out of the file."""
    heads = tuple(f"[{name.replace('_', '.', 1)}]\n" for name in names)
    exercise.answers.write_text("".join(table for table in tables(exercise) if not table.startswith(heads)))


def put(exercise, name, **keys):
    """Write one answer, in the place of one with that name."""
    remove(exercise, name)
    with open(exercise.answers, "a") as file:
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in keys.items()]
        file.write("".join([f"\n[{name.replace('_', '.', 1)}]\n", *lines]))


@pytest.fixture
def course(tmp_path):
    """A copy of the course for the test to change; `course()` is one exercise of it, with few answers."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def get(name="block_partition"):
        exercise = Catalogue(tmp_path)[name]
        if name == "block_partition":
            remove(exercise, "right_fractions", *set(WRONG) - KEPT)
            stubs.write_generated_files(exercise)  # a solution names the usual wrong answers
        return exercise

    return get


def problems(server, exercise) -> str:
    gate = Gate(server)
    assert gate.run([exercise]) == gate.green
    return "\n".join(gate.problems)


@pytest.mark.parametrize("name", Catalogue())
def test_the_gate_refuses_wrong_answers_and_accepts_the_solution(server, name):
    gate = Gate(server, right_answers=False)
    assert gate.run([Catalogue()[name]]), "\n".join(gate.problems)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", Catalogue())
def test_the_gate_accepts_every_right_answer(server, name):
    gate = Gate(server, everything_else=False)
    assert gate.run([Catalogue()[name]]), "\n".join(gate.problems)


def test_a_copy_of_the_course_is_green(server, course):
    assert not problems(server, course())


@pytest.mark.parametrize("wrong", ["wrong_ceiling", *exhaustive(*sorted(KEPT - {"wrong_ceiling"}))])
def test_a_wrong_answer_in_the_solutions_place_is_red(server, course, wrong):
    exercise = course()
    exercise.solution.write_text(stubs.generate_answer(exercise, wrong))
    told = problems(server, exercise)
    assert "block_partition is right and fails" in told
    assert "block_partition.py of ch01_data_distribution is not what the package generates now" in told


def test_an_emptied_stub_is_red(server, course):
    exercise = course()
    exercise.stub.write_text("")
    assert "the stub must fail divides_evenly as unwritten, and it is told: missing" in problems(server, exercise)


def test_a_stub_that_gives_the_answer_away_is_red(server, course):
    exercise = course()
    shutil.copy(exercise.solution, exercise.stub)
    assert "the stub must fail each_index_once as unwritten, and it is told: nothing wrong" in problems(
        server, exercise
    )


def test_an_exercise_without_answers_is_red(server, course):
    exercise = course()
    exercise.answers.unlink()
    told = problems(server, exercise)
    assert "0 right answers" in told and "at least 4 wrong answers" in told and "wrong_cheat is missing" in told


def test_a_right_answer_among_the_wrong_ones_is_red(server, course):
    exercise = course()
    put(exercise, "wrong_loop", caught_by="each_index_once", note="-", text=read_answers(exercise)["right_loop"].text)
    assert "wrong_loop is wrong and passes each_index_once, which must catch it" in problems(server, exercise)


def test_a_wrong_answer_that_names_no_test_is_red(server, course):
    exercise = course()
    put(exercise, "wrong_ceiling", caught_by="some_test", note="-", text="def block_partition(*_):\n    return 3\n")
    assert "wrong_ceiling must name the test that catches it" in problems(server, exercise)


def test_a_wrong_answer_that_is_only_broken_is_red_unless_it_says_so(server, course):
    exercise = course()
    keys = {"caught_by": "divides_evenly", "note": "-", "text": "def block_partition(*_):\n    return ceiling\n"}
    put(exercise, "wrong_ceiling", **keys)
    told = 'wrong_ceiling is caught as raised; it must have finding = "raised" if that is its fault'
    assert told in problems(server, exercise)
    put(exercise, "wrong_ceiling", **keys, finding="raised")
    assert "is caught as" not in problems(server, exercise)
    put(exercise, "wrong_ceiling", **{**keys, "text": "def block_partition(*_):\n    return 3\n"}, finding="raised")
    assert "wrong_ceiling is caught as type" in problems(server, exercise)


def test_an_unnoticed_cheat_is_red(server, course):
    exercise = course()
    text = "def block_partition(*_):\n    return 3\n"
    put(exercise, "wrong_cheat_alias", caught_by="divides_evenly", note="no cheat", text=text)
    assert "wrong_cheat_alias is caught as type, not as forbidden" in problems(server, exercise)


def test_a_report_that_shows_nothing_found_is_red(server, course, monkeypatch):
    monkeypatch.setattr(check.Verdict, "reported", property(lambda verdict: next(iter(skipped(verdict)), None)))
    assert "the message for block_partition.py does not say what was found" in problems(server, course())


def skipped(verdict):
    finding = Finding("skipped", "")
    return [check.TestResult("", "", 0, 1, finding) for result in verdict.results if result.finding]


def test_a_copy_is_no_second_right_answer(server, course):
    exercise = course()
    put(exercise, "right_again", note="-", text=stubs.solution_code(exercise))
    assert "right_again is the same program as block_partition" in problems(server, exercise)


def test_an_edit_that_does_not_fit_the_solution_is_red(server, course):
    exercise = course()
    for find in ("no such text", "n"):
        put(exercise, "right_again", note="-", edits=[])
        exercise.answers.write_text(
            exercise.answers.read_text().replace("edits = []", f'edits = [{{ find = "{find}", replace = "" }}]')
        )
        told = problems(server, exercise)
        assert "right_again: the text to be edited must occur once, and occurs" in told and told.endswith(f":\n{find}")


def test_a_test_that_lets_everything_pass_is_red(server, course):
    exercise = course()
    text = exercise.test_file.read_text()
    head, tail = text.split("def each_index_once(answer):")
    exercise.test_file.write_text(head + "def each_index_once(answer):\n    '''Anything.'''\n    return\n" + tail)
    assert "an empty answer passes each_index_once" in problems(server, exercise)


def test_a_message_of_fifteen_lines_is_red(server, course, monkeypatch):
    text = report.format_verdict
    monkeypatch.setattr(report, "format_verdict", lambda *args: text(*args) + "\n" * 8 + "more")
    assert "at most 14 are read" in problems(server, course())


def test_a_gate_that_checked_nothing_is_red(server):
    gate = Gate(server)
    assert not gate.run([]) and gate.problems == ["no exercise was checked"]


# Kinds whose answers are programs, and predictions


def few(exercise):
    """The exercise with one of its usual wrong answers, which is enough to see how its gate turns red."""
    keep = {"wrong_zero", "wrong_constant", "wrong_cheat", "wrong_rank_0_of_4", "wrong_named_only", "wrong_one_sender"}
    answers = read_answers(exercise)
    remove(exercise, *{answer.name for answer in answers.wrong} - keep, answers.right[0].name)
    return exercise


@pytest.mark.parametrize("name", ["repaired_script", "falling_loss", "which_rank_hangs"])
def test_each_kind_is_red_with_a_wrong_solution_and_a_stub_that_gives_it_away(server, course, name):
    exercise = few(course(name))
    shutil.copy(exercise.solution, exercise.stub)
    exercise.solution.write_text(stubs.generate_answer(exercise, "wrong_cheat"))
    told = problems(server, exercise)
    assert f"{name} is right and fails" in told
    test, reason = (exercise.fails, "for its fault") if exercise.fails else (exercise.tests()[0].id, "as unwritten")
    assert f"the stub must fail {test} {reason}, and it is told: nothing wrong" in told


def test_a_program_that_changed_is_red_until_it_is_generated(server, course):
    exercise = course("which_rank_hangs")
    exercise.source.write_text(exercise.source.read_text() + "\n\nnewer = True\n")
    told = problems(server, exercise)
    assert "which_rank_hangs.py of ch00_first_run is not what the package generates now" in told


def test_what_stubs_must_do_depends_on_the_kind(server, course):
    """A script whose stub is unwritten, or has no fault any more, is no exercise of its kind."""
    exercise = few(course("repaired_script"))
    exercise.stub.write_text(
        "def main(*args, **kwargs):\n    raise NotImplementedError('mend it')\n\n\n"
        "import torch\n\n\nclass Network(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(10, 20), torch.nn.Linear(20, 1)\n\n\n"
        "def device_and_backend(*args):\n    pass\n"
    )
    told = problems(server, exercise)
    assert "the stub must fail joins_with_the_assigned_rank for its fault, and it is told: unwritten" in told


@pytest.mark.parametrize("name", ["wrong_zero", "wrong_constant", "wrong_cheat"])
def test_three_wrong_answers_are_asked_of_every_kind(server, course, name):
    exercise = course("which_rank_hangs")
    remove(exercise, name)
    assert f"{name} is missing" in problems(server, exercise)
