"""`python -m exercises new`: every file of an exercise is there, and the gate says what a person must still write."""

import shutil

import pytest

from exercises import stubs
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.gate import Gate
from exercises.new import find_placeholders

CHAPTER = "ch01_data_distribution"


@pytest.fixture
def course(tmp_path):
    """A copy of one chapter, in which new exercises may be written."""
    for folder in ("exercises", "solutions"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder / CHAPTER, tmp_path / folder / CHAPTER, ignore=ignored)
    return tmp_path


@pytest.fixture
def course_map(course):
    """The copy's course map."""
    (course / "chapters").mkdir()
    return shutil.copy(ROOT / "chapters" / "README.md", course / "chapters" / "README.md")


def create(course, name="own_block", piece="minidist.data.partition:block_partition", chapter=CHAPTER) -> int:
    return main(["--root", str(course), "new", name, "--chapter", chapter, "--piece", piece])


def content(course) -> dict:
    return {
        file: file.read_bytes() for file in course.rglob("*.*") if file.is_file() and "__pycache__" not in str(file)
    }


@pytest.mark.parametrize(
    "piece", ["minidist.data.partition:block_partition", "minidist.simple.data_parallel:NaiveReducer"]
)
def test_all_files_of_a_new_exercise_are_written_and_the_others_stay(course, capsys, piece):
    before = content(course)
    assert create(course, piece=piece) == 0
    exercise = Catalogue(course)["own_block"]
    new = {exercise.stub, exercise.test_file, exercise.solution, exercise.answers}
    tables = exercise.folder / "exercise.toml"
    after = content(course)
    assert after.keys() - before.keys() == new
    assert [file for file in before if before[file] != after[file]] == [tables]
    assert after[tables].startswith(before[tables])
    output = capsys.readouterr().out
    assert all(f"{file}\n" in output for file in [*new, tables]) and "gate own_block lists what is missing" in output
    assert not stubs.outdated_files(exercise) and "raise NotImplementedError" in exercise.stub.read_text()
    others = [int(each.section.split(".")[1]) for each in Catalogue().values() if each.chapter == CHAPTER]
    assert exercise.section == f"1.{max(others) + 1}"


def test_the_gate_says_what_is_missing_and_nothing_else(server, course):
    create(course)
    gate = Gate(server)
    assert not gate.run([Catalogue(course)["own_block"]])
    missing = ["title", "route", "statement", "why", "call 1", "hint 1", "hint 2", "blank 1", "test_own_block.py"]
    told = [problem.removeprefix("own_block: ") for problem in gate.problems]
    assert told[: len(missing)] == [f"{each} is still to be written" for each in missing]
    assert "0 right answers besides the solution; at least 2 are needed" in told
    assert not any(each.endswith("is missing") for each in told)
    assert any("at least 4 wrong answers are needed" in each for each in told)


def test_an_exercise_that_the_course_map_does_not_name_is_missing_there(course, course_map):
    create(course)
    assert not find_placeholders(Catalogue(course)["block_partition"])
    told = "chapters/README.md does not name it in a row of chapter 01"
    assert find_placeholders(Catalogue(course)["own_block"])[-1] == told
    text = course_map.read_text()
    for chapter, missing in (("03", True), ("01", False)):
        course_map.write_text(text + f"| idea | {chapter} | | `own_block` | |\n")
        assert (told in find_placeholders(Catalogue(course)["own_block"])) == missing


@pytest.mark.parametrize(
    "options, output",
    [
        ({"name": "block_partition"}, "there is an exercise block_partition already, in ch01_data_distribution"),
        ({"name": "own-block"}, "the name of an exercise is that of its files"),
        ({"chapter": "ch11_more"}, "ch11_more has no exercise.toml; chapters are ch01_data_distribution"),
        ({"piece": "minidist.data.partition"}, "a piece is module:symbol"),
        ({"piece": "minidist.data.nothing:block_partition"}, "a piece is module:symbol"),
        ({"piece": "minidist.data.partition:blok"}, "minidist.data.partition has no function or class blok"),
        ({"piece": "minidist.errors:RunError"}, "has no function whose body"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(course, capsys, options, output):
    before = content(course)
    assert create(course, **options) == 2
    assert output in capsys.readouterr().err and content(course) == before
