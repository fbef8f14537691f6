"""A learner's function in place of the package's, on every rank, with a counter of its calls."""

import ast
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exercises.catalogue import Exercise
from exercises.work import Work
from minidist.errors import UserError

_CALLS = "__calls__"


@dataclass(frozen=True)
class LearnerPiece:
    """A learner's piece for the ranks. symbols: `module:symbol`, the piece itself last. source: of the file."""

    name: str
    symbols: tuple[str, ...]
    file: str
    source: str


def read_piece(exercise: Exercise, work: Work) -> LearnerPiece:
    """Read the learner's file for the ranks."""
    file = work.file(exercise)
    return LearnerPiece(exercise.name, exercise.pieces, str(file), file.read_text())


def install_pieces(pieces: Sequence[LearnerPiece]) -> Counter:
    """Replace the package's symbols by the pieces in this process; return the counter of their calls."""
    from minidist.tools.pieces import SymbolReplacements

    calls: Counter = Counter()
    replacements = SymbolReplacements()
    for piece in pieces:
        for symbol in piece.symbols:
            count = _add_call_counter(symbol_name(symbol), piece.name) if symbol == piece.symbols[-1] else None
            vars(importlib.import_module(symbol.partition(":")[0]))[_CALLS] = calls
            try:
                replacements.replace_symbol(
                    symbol, piece.source, piece.file, count, [symbol_name(each) for each in piece.symbols]
                )
            except (UserError, SyntaxError) as error:
                raise UserError(f"{piece.name} cannot replace the package's code: {error}") from None
    return calls


def symbol_name(symbol: str) -> str:
    """Return the last part of `module:symbol`: "block_partition" of `minidist.data.partition:block_partition`."""
    return symbol.partition(":")[2]


def _add_call_counter(symbol: str, name: str):
    """Wrap the function, or every method of the class, to count its calls."""

    def prepare(tree: ast.Module) -> ast.Module:
        nodes = [node for node in tree.body if getattr(node, "name", None) == symbol]
        if not nodes:
            raise UserError(f"your file must define {symbol} with def or class")
        for node in nodes:
            functions = [node] if isinstance(node, ast.FunctionDef) else node.body
            for function in functions:
                if isinstance(function, ast.FunctionDef):
                    _count(function)
        return ast.fix_missing_locations(tree)

    def _count(function: ast.FunctionDef) -> None:
        [statement] = ast.parse(f"{_CALLS}[{name!r}] += 1").body
        for part in ast.walk(statement):
            ast.copy_location(part, function)  # errors point to the `def` line
        function.body.insert(1 if ast.get_docstring(function) is not None else 0, statement)

    return prepare
