"""Paths, modules and symbols that docstrings name in backticks exist."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.code_names import (
    code_spans,
    find_unknown_names,
    find_unknown_paths,
    identifiers,
    members_of_classes,
    parsed_modules,
)

# What docstrings name that is not in the repository, and the reason.
EXCEPTIONS = {
    "_effect": "a function of the programs that `exercises.generated_mistakes` writes",
    "answer.main": "an example's module of a learner",
    "head": "a command of the shell",
    "python": "a command of the shell",
    "transformers.LlamaConfig": "of a package that need not be installed",
    "work": "the learner's folder",
    "work/chapters/01_data_distribution": "the learner's folder",
}


def docstrings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of a module, its classes and its functions."""
    is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if is_documented and (text := ast.get_docstring(node, clean=False)):
        yield getattr(node, "name", "module"), text
    for block in ("body", "orelse", "finalbody", "handlers"):
        for child in getattr(node, block, ()) if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler) else ():
            yield from docstrings(child)


def find_unknown(tree: ast.Module) -> list[tuple[str, str, str]]:
    """List (name of the docstring, code in backticks, what does not exist) of a module's docstrings.

    A name exists if the module's code contains it, or if it is a member of a class that the module or one of its
    docstrings mentions, or a public name of the package, a library or Python.
    """
    texts = list(docstrings(tree))
    known = identifiers(tree)
    known |= members_of_classes(known | {word for _, text in texts for word in re.findall(r"\w+", text)})
    return [
        (name, span, found)
        for name, text in texts
        for span in code_spans(text)
        for found in (*find_unknown_paths(span), *find_unknown_names(span, known))
        if found not in EXCEPTIONS
    ]


def test_docstrings_name_only_what_exists():
    """Those of tasks are checked by `test_exercise_names`."""
    unknown = [
        f"{module}: {name}: `{span}`: there is no {found}"
        for module, tree in parsed_modules().items()
        for name, span, found in find_unknown(tree)
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    ("docstring", "unknown"),
    [
        ("Calls `add(name)` of `accumulate(name)`.", ["add"]),
        ("See `tools/recording.py`, `comm/meter.py`, `comm/` and `work/`.", ["tools/recording.py"]),
        (
            "`Meter.record`, `Meter.count`, `Tensor.view` and `Tensor.count` of `count`.",
            ["Meter.count", "Tensor.count", "count"],
        ),
        ("`minidist.comm.meter:Meter`, `minidist.comm.meter.Meter.clock`.", ["minidist.comm.meter.Meter.clock"]),
        ("`torch.no_grad`, `torch.no_graph`, `no_grad`, `no_graph`.", ["torch.no_graph", "no_graph"]),
        ("`--train.steps 3`, `fist + n - 1`, `step-NAME`, `train.steps`, `train.stapes`.", ["fist", "train.stapes"]),
    ],
)
def test_an_unknown_name_is_found(docstring, unknown):
    tree = ast.parse(f'def f(name, *, step):\n    """{docstring}"""\n    return accumulate(name)\n')
    assert [found for _, _, found in find_unknown(tree)] == unknown
