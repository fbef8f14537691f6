"""Statements, hints, lists of calls and messages of exercises name only what exists.

Looked up are the names that texts set as code: in backticks, with an underscore or a dot, before a parenthesis, or with
a capital inside. A name exists if a learner can meet it: in the stub, in the statement (for hints and messages), in
the test (for its messages), as a public name of the package, of torch or of Python, or as the name of an exercise.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator

import pytest

from exercises import stubs
from exercises.catalogue import Catalogue, Exercise
from tests.helpers.code_names import (
    all_members,
    code_spans,
    find_unknown_names,
    find_unknown_paths,
    identifiers,
    members,
    members_of_classes,
    public_names,
)

CATALOGUE = Catalogue()
# What looks like code and is no name of the course.
EXCEPTIONS = {
    **dict.fromkeys(("AdamW", "DiLoCo", "KiB", "NaN", "NumPy", "ZeRO"), "a word of the field"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"), "a variable that torchrun sets"),
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "optimizer.exp_avg", "optimizer.exp_avg_sq"), "states of torch's AdamW"),
    **dict.fromkeys(("kv_head", "theta.sub_"), "a size and a tensor of an example"),
    "num_workers": "an argument of torch's DataLoader",
    "THIS_FILE": "stands for the learner's file in a command",
}
_WORD = re.compile(r"(?<![\w./-])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*")
_SUBSCRIPT = re.compile(r"[A-Za-z]+_[a-z0-9]")  # of a formula, as in `w_i`


def code_in(text: str) -> Iterator[str]:
    """Yield each piece of a text that is set as code."""
    yield from code_spans(text)
    text = re.sub(r'`[^`]+`|"[^"\s]+"', " ", text)  # without names of files and tensors, which are quoted
    for match in _WORD.finditer(text):
        word, is_call = match[0], text[match.end() : match.end() + 1] == "("
        if is_call or "." in word or "_" in word.rstrip("_") or re.search(r"[a-z][A-Z]", word):
            yield word


def texts(exercise: Exercise) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every text of an exercise that a learner reads; places are statement, call, hint, test."""
    if exercise.piece:
        yield "statement", exercise.statement
        yield from (("hint", change.put) for change in exercise.changes)
    else:
        yield "statement", ast.get_docstring(ast.parse(exercise.source.read_text())) or ""
    yield from (("call", call) for call in exercise.calls)
    yield from (("hint", text) for text in (*exercise.hints, exercise.title))
    test = ast.parse(exercise.test_file.read_text())
    for node in test.body[1:]:  # nobody shows the module's docstring
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                yield "test", part.value


def find_unknown(exercise: Exercise) -> list[tuple[str, str, str]]:
    """List (place, code, what does not exist) of an exercise's texts."""
    stub, test = ast.parse(stubs.generate_stub(exercise)), ast.parse(exercise.test_file.read_text())
    statement = ast.get_docstring(stub) or ""
    in_stub = identifiers(stub)
    in_stub |= {"handle", *members("Attention"), *members("SwiGLU")}  # of an operation or a hook; layers of the model
    in_stub |= members_of_classes(in_stub | set(re.findall(r"[A-Z]\w+[a-rt-z]", statement))) | CATALOGUE.keys()
    told = set(re.findall(r"\w+", statement))
    known = {
        "statement": in_stub | introduced(statement),
        "call": in_stub | introduced(statement),
        "hint": in_stub | told | introduced("\n".join(exercise.hints)),
        "test": in_stub | told | identifiers(test),
    }
    return [
        (place, code, found)
        for place, text in texts(exercise)
        for code in code_in(text)
        if not _SUBSCRIPT.fullmatch(code)
        for found in (*find_unknown_paths(code), *find_unknown_names(code, known[place] | attributes(code)))
        if found not in EXCEPTIONS and found.removesuffix("s") not in {*EXCEPTIONS, *in_stub, *public_names()}
    ]


def introduced(text: str) -> set[str]:
    """Return the names that a text introduces: arguments of calls, and variables that it assigns or loops over."""
    lists = [
        *re.findall(r"\w\(([^()]*)\)", text),
        *re.findall(r"([\w, ]+) = ", text),
        *re.findall(r"\bfor (\w+) in ", text),
    ]
    return {name for each in lists for name in re.findall(r"\w+", each)}


def attributes(code: str) -> set[str]:
    """Return the parts of a dotted name after the first that are members of any class."""
    return {part for name in re.findall(r"\w+(?:\.\w+)+", code) for part in name.split(".")[1:]} & all_members()


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_exercise_names_only_what_exists(name):
    unknown = find_unknown(CATALOGUE[name])
    assert not unknown, "\n".join(f"{place}: {code}: there is no {found}" for place, code, found in unknown)


@pytest.mark.parametrize(
    ("hint", "unknown"),
    [
        ("Call Block.launch, and Block.forward after it.", ["Block.launch"]),
        ("Before a block computes, need(block) gathers it; gather(flat) does.", ["need"]),
        ("Append `row` to self._after, and free_all to flat_params.", ["row", "self._after", "free_all"]),
        ("See minidist.simple.zero:ZeroStage2 and `minidist/simple/zeros.py`.", ["minidist/simple/zeros.py"]),
        ("Add up total = n * w_i over the ranks, and divide each w_i by max(total, 1).", []),
    ],
)
def test_an_unknown_name_is_found(hint, unknown):
    exercise = dataclasses.replace(CATALOGUE["zero_stage_three"], hints=(hint,))
    assert [found for _, _, found in find_unknown(exercise)] == unknown
