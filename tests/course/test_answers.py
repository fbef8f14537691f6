"""Files of answers: their format, and programs made from edits of a solution."""

import ast
import json
import shutil

import pytest
import torch

from exercises import generated_answers, stubs
from exercises.answers import Edit, apply_edits, read_answers
from exercises.catalogue import Catalogue
from minidist.errors import UserError
from tests.helpers.undefined_names import find_undefined_names

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]


@pytest.fixture
def exercise(tmp_path):
    """`exercise(text)`: an exercise of a course of its own whose file of answers has that text."""
    copy = tmp_path / "exercises" / BLOCK.chapter
    shutil.copytree(BLOCK.folder, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def written(text):
        found = Catalogue(tmp_path)[BLOCK.name]
        found.answers.write_text(text)
        return found

    return written


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_answer_is_a_program_and_no_two_are_the_same(name):
    answers = read_answers(CATALOGUE[name])
    texts = {answer: stubs.generate_answer(CATALOGUE[name], answer) for answer in answers.by_name}
    assert len(set(texts.values())) == len(texts)
    for answer, text in texts.items():
        if answers[answer].finding != "syntax":
            assert ast.get_docstring(ast.parse(text)), answer


def test_no_answer_fails_because_of_an_undefined_name(tmp_path):
    texts = {}
    for name, exercise in CATALOGUE.items():
        answers = read_answers(exercise)
        for answer in answers.by_name:
            if answers[answer].finding != "syntax":
                texts[f"{name} {answer}"] = stubs.generate_answer(exercise, answer)
    assert len(texts) > 500
    assert find_undefined_names(texts, tmp_path) == []


@pytest.mark.parametrize(
    "text, told",
    [
        ("[right.a]\nnote = ", "is not TOML"),
        ("[wright.a]\nnote = 'x'\n", "has unknown tables ['wright']"),
        ("[right.a]\nnotes = 'x'\n", "[right.a] has unknown keys ['notes']; the keys of a right answer are"),
        ("[right.a]\ncaught_by = 'x'\n", "[right.a] has unknown keys ['caught_by']"),
        ("[right]\na = 'x'\n", "[right.a] is not a table"),
        ("[wrong.a]\nnote = 3\n", "every key but edits must be a text"),
        ("[wrong.a]\nedits = [{ find = 'x' }]\n", "edits must be a list of"),
        ("[wrong.a]\nedits = [{ find = '', replace = 'x' }]\n", "find must not be empty"),
        ("[wrong.a]\ntext = 'x'\nedits = [{ find = 'a', replace = 'x' }]\n", "has both edits and a text"),
    ],
)
def test_a_wrong_file_is_refused(exercise, text, told):
    with pytest.raises(UserError) as error:
        read_answers(exercise(text))
    assert told in str(error.value)


@pytest.mark.parametrize(
    "text, name, told",
    [
        ("[right.a]\nnote = 'x'\n", "right_b", "has no answer 'right_b'; it has right_a"),
        ("[right.a]\nnote = 'x'\n", "right_a", "right_a has neither edits nor a text"),
        ("[right.a]\nedits = [{ find = 'no such', replace = '' }]\n", "right_a", "must occur once, and occurs 0 times"),
        ("[right.a]\nof = 'right_b'\nedits = [{ find = 'x', replace = 'y' }]\n", "right_a", "has no answer 'right_b'"),
        (
            "[wrong.b]\ntext = 'x = 1'\n[right.a]\nof = 'wrong_b'\nedits = [{ find = 'x', replace = 'y' }]\n",
            "right_a",
            "may be edits of the solution, or of a right answer",
        ),
    ],
)
def test_an_answer_that_cannot_be_built_is_refused(exercise, text, name, told):
    with pytest.raises(UserError) as error:
        stubs.generate_answer(exercise(text), name)
    assert told in str(error.value)


def test_edits_are_exact_and_independent_of_their_order():
    edits = (Edit("two", "2"), Edit("one", "two"))
    assert apply_edits("one, two\n", edits, "here") == apply_edits("one, two\n", edits[::-1], "here") == "two, 2\n"
    for find, told in (("n", "occurs 2 times:\nn"), ("x", "occurs 0 times:\nx")):
        with pytest.raises(UserError, match=told):
            apply_edits("none\n", (Edit(find, ""),), "here")
    with pytest.raises(UserError, match="here: two edits overlap"):
        apply_edits("one, two\n", (Edit("one, t", ""), Edit("two", "")), "here")


def test_answers_may_be_edits_of_a_right_answer_and_have_their_note_as_docstring(exercise):
    text = json.dumps("def block_partition(n, world_size, rank):\n    return 1\n")
    tables = f"[right.a]\ntext = {text}\n[wrong.b]\nnote = 'two'\nof = 'right_a'\n"
    found = exercise(tables + "edits = [{ find = 'return 1', replace = 'return 2' }]\n")
    assert (
        stubs.generate_answer(found, "wrong_b")
        == '"""two"""\n\n\ndef block_partition(n, world_size, rank):\n    return 2\n'
    )


def test_generated_answers_have_one_number_in_the_place_of_each(exercise):
    found = exercise("[wrong.zero]\n[wrong.constant]\n")
    for name, number in (("wrong_zero", 0), ("wrong_constant", 3)):
        defined = {}
        exec(stubs.generate_answer(found, name), defined)
        assert defined["block_partition"](7, 2, 0).tolist() == [number] * 4
        state = {"tensor": torch.ones(2), "of": [(1, 2.5), True]}
        assert defined["_filled"](state["of"]) == [(number, float(number)), bool(number)]
        assert defined["_filled"](state)["tensor"].tolist() == [number] * 2

        def add(tensors, other):
            tensors[0].add_(other)

        changed, unchanged = torch.ones(2), torch.full((2,), 7.0)
        defined["_with_filled_results"](add)([changed], other=unchanged)
        assert changed.tolist() == [number] * 2 and unchanged.tolist() == [7, 7]


def test_classes_and_programs_have_no_generated_zero():
    for name in ("data_parallel", "repaired_script"):
        with pytest.raises(UserError, match="only an exercise about a function of the package has a generated wrong_"):
            generated_answers.generate_constant_results(CATALOGUE[name], "", "wrong_zero")


@pytest.mark.parametrize("name", ["data_parallel", "token_count"])
def test_the_generated_cheat_uses_every_symbol_of_the_package(name):
    text = stubs.generate_answer(CATALOGUE[name], "wrong_cheat")
    for piece in CATALOGUE[name].pieces:
        module, _, symbol = piece.partition(":")
        assert f"import {module} as own_" in text and f".{symbol}" in text
