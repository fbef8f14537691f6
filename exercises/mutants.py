"""Mutants of a program: copies with one small change, as a mistake would make it.

Each mutant drops, swaps or shifts one thing inside the lines that a learner writes: a wait, a division, a comparison, a
number. A test that passes one misses that mistake, unless the mutant is equivalent to the original.
"""

import ast
import contextlib
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exercises.mutation_operators import mutations_of

_BLANK = "raise NotImplementedError("


@dataclass(frozen=True)
class Mutant:
    """One changed program.

    kind: of change. line: of the original where the change begins. was, becomes: the changed lines before and after,
    without indentation, joined by a space. text: the whole program.
    """

    kind: str
    line: int
    was: str
    becomes: str
    text: str


def blank_lines(stub: str, solution: str) -> list[range]:
    """Return the line numbers of a solution that its stub leaves blank, one range per blank."""
    old, new = stub.splitlines(), solution.splitlines()
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [range(c + 1, d + 1) for tag, a, b, c, d in steps if any(_BLANK in line for line in old[a:b])]


def make_mutants(text: str, lines: Sequence[range]) -> list[Mutant]:
    """Return all mutants of `text` within the ranges of lines, without duplicates."""
    tree = ast.parse(text)
    found: dict[str, Mutant | None] = {ast.dump(tree): None}
    for node in _walk_nodes(tree):
        for kind, place, change in mutations_of(node):
            if any(place.lineno in each and place.end_lineno in each for each in lines):
                changed = _replace_node(text, place, change)
                with contextlib.suppress(SyntaxError):  # some changes do not parse
                    found.setdefault(ast.dump(ast.parse(changed)), _make_mutant(text, kind, place, changed))
    return sorted(filter(None, found.values()), key=lambda mutant: mutant.line)


def _walk_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and its descendants, except inside f-strings: the wording of messages is not tested."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk_nodes(child)


def _replace_node(text: str, place: ast.AST, change: ast.AST | str) -> str:
    """Return the program with a node replaced by `change`."""
    rows = text.encode().splitlines(keepends=True)
    head, tail = rows[place.lineno - 1][: place.col_offset], rows[place.end_lineno - 1][place.end_col_offset :]
    new = change if isinstance(change, str) else _unparse(change)
    return b"".join([*rows[: place.lineno - 1], head, new.encode(), tail, *rows[place.end_lineno :]]).decode()


def _make_mutant(text: str, kind: str, place: ast.AST, changed: str) -> Mutant:
    """Return the mutant whose program is `changed`. text: the original. place: the changed node."""
    old, new = text.splitlines(), changed.splitlines()
    first, after = place.lineno - 1, len(old) - place.end_lineno
    return Mutant(
        kind,
        place.lineno,
        _join_lines(old[first : len(old) - after]),
        _join_lines(new[first : len(new) - after]),
        changed,
    )


def _join_lines(lines: Sequence[str]) -> str:
    """Return lines as one, with single spaces."""
    return " ".join(" ".join(lines).split())


def _unparse(node: ast.AST) -> str:
    """Unparse a node, with parentheses where precedence may require them."""
    loose = isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp | ast.IfExp)
    return f"({ast.unparse(node)})" if loose else ast.unparse(node)
