"""The gate is green on what is there, and turns red for each thing that it is there to see."""

import shutil

import pytest

from exercises import report
from exercises.catalogue import ROOT, Catalogue
from exercises.gate import Gate

FOLDERS = (
    "exercises/ch01_data_distribution",
    "solutions/ch01_data_distribution",
    "tests/answers/ch01_data_distribution",
)


@pytest.fixture
def course(tmp_path):
    """A copy of the course that may be spoilt; `course("block_partition")` is one exercise of it."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return lambda name="block_partition": Catalogue(tmp_path)[name]


def problems(server, exercise) -> str:
    gate = Gate(server)
    assert gate.run([exercise]) == gate.green
    return "\n".join(gate.problems)


@pytest.mark.parametrize("name", Catalogue())
def test_the_gate_is_green(server, name):
    gate = Gate(server)
    assert gate.run([Catalogue()[name]]), "\n".join(gate.problems)


def test_a_copy_of_the_course_is_green(server, course):
    assert not problems(server, course())


@pytest.mark.parametrize("wrong", sorted(file.stem for file in Catalogue()["block_partition"].answers.glob("wrong_*")))
def test_a_wrong_answer_in_the_solutions_place_is_red(server, course, wrong):
    exercise = course()
    shutil.copy(exercise.answers / f"{wrong}.py", exercise.solution)
    told = problems(server, exercise)
    assert "block_partition.py is right and fails" in told
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


def test_an_emptied_folder_of_answers_is_red(server, course):
    exercise = course()
    shutil.rmtree(exercise.answers)
    told = problems(server, exercise)
    assert "0 right answers" in told and "at least 4 wrong answers" in told and "wrong_cheat.py is missing" in told


def test_a_right_answer_among_the_wrong_ones_is_red(server, course):
    exercise = course()
    right = (exercise.answers / "right_loop.py").read_text()
    (exercise.answers / "wrong_loop.py").write_text(right.replace('"""', '"""each_index_once: ', 1))
    assert "wrong_loop.py is wrong and passes each_index_once, which must catch it" in problems(server, exercise)


def test_a_wrong_answer_that_names_no_test_is_red(server, course):
    exercise = course()
    file = exercise.answers / "wrong_ceiling.py"
    file.write_text(file.read_text().replace("sizes_differ_by_at_most_one", "some_test"))
    assert "wrong_ceiling.py must begin with" in problems(server, exercise)


def test_a_copy_is_no_second_right_answer(server, course):
    exercise = course()
    shutil.copy(exercise.solution, exercise.answers / "right_again.py")
    assert "right_again.py is the same program as block_partition.py" in problems(server, exercise)


def test_a_test_that_lets_everything_pass_is_red(server, course):
    exercise = course()
    text = exercise.test_file.read_text()
    head, tail = text.split("def each_index_once(answer):")
    exercise.test_file.write_text(head + "def each_index_once(answer):\n    '''Anything.'''\n    return\n" + tail)
    assert "an empty answer passes each_index_once" in problems(server, exercise)


def test_a_message_of_fifteen_lines_is_red(server, course, monkeypatch):
    text = report.text
    monkeypatch.setattr(report, "text", lambda *args: text(*args) + "\n" * 8 + "more")
    assert "at most 14 are read" in problems(server, course())


def test_a_gate_that_checked_nothing_is_red(server):
    gate = Gate(server)
    assert not gate.run([]) and gate.problems == ["no exercise was checked"]
