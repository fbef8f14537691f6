"""Training with the learner's code: the trainer with the learner's passed pieces in place of the package's.

A piece is used if its exercise is passed, its file has not changed since, and the run's options call it: `route` of
exercise.toml is "always", the options needed, or "none: " and the reason. At the end every rank reports its calls; a
piece that some rank never called although it should have is an error.
"""

import ast
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exercises.catalogue import Catalogue, Exercise
from exercises.work import Work
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from minidist.comm import World
    from minidist.config import Config

_NONE = "none: "
_CALLS = "__calls__"


@dataclass(frozen=True)
class LearnerPiece:
    """A learner's piece for the ranks. symbols: `module:symbol`, the piece itself last. source: of the file.

    one_rank: whether one rank alone calls it, instead of every rank.
    """

    name: str
    symbols: tuple[str, ...]
    file: str
    source: str
    one_rank: bool = False


@dataclass
class PieceChoice:
    """A passed piece and whether this run uses it. options: needed for it. left_out: why it is not used, or ""."""

    exercise: Exercise
    options: tuple[str, ...] = ()
    left_out: str = ""


def train(catalogue: Catalogue, work: Work, only: Sequence[str], argv: list[str]) -> None:
    """Train with the passed pieces (those named in `only`, if any are) and the options of `minidist train` in `argv`.

    Raises UserError if the run uses no passed piece, RunError if it fails or never calls one of them.
    """
    from minidist.tools.cli import parse_train_options
    from minidist.tools.launch.start import choose_default_ranks, start
    from minidist.tools.launch.torchrun import is_first_rank, is_under_torchrun, read_world_size

    passed = passed_pieces(catalogue, work, only)
    config, ranks = parse_train_options(argv)
    size = read_world_size() if is_under_torchrun() else ranks or choose_default_ranks(config)
    same = [exercise for exercise in passed if work.is_unchanged_since_pass(exercise)]
    changed = [exercise for exercise in passed if exercise not in same]
    choices = choose_pieces(same, size)
    choices += [
        PieceChoice(one, left_out=f"changed since it passed: python -m exercises check {one.name}") for one in changed
    ]
    config, _ = parse_train_options(argv, default_options=[word for choice in choices for word in choice.options])
    for choice in choices:
        if not choice.left_out and (conflict := conflicting_option(choice, config, size)):
            choice.left_out, choice.options = f"your options conflict with {conflict}, which calls this piece", ()
    used = [read_piece(choice.exercise, work) for choice in choices if not choice.left_out]
    choices_text = "\n".join(_format_choice(choice) for choice in choices)
    if not used:
        raise UserError(f"this run calls none of your passed pieces:\n{choices_text}")
    if is_first_rank():
        print(choices_text, flush=True)
    start(config, ranks, train_with_pieces, (used,))


def choose_pieces(passed: Sequence[Exercise], ranks: int) -> list[PieceChoice]:
    """Choose the pieces that one run can use; of two with conflicting options, the later one."""
    choices, taken = [], {}
    for exercise in reversed(passed):
        if not has_route(exercise):
            choices.append(PieceChoice(exercise, left_out=exercise.route.removeprefix(_NONE) or "it is not connected"))
            continue
        wanted = route_options(exercise, ranks, {name: values for name, (values, _) in taken.items()})
        clash = next((taken[name] for name, value in wanted.items() if taken.get(name, (value,))[0] != value), None)
        if clash:
            why = f"its options conflict with those of {clash[1]}; to use this one instead: --only {exercise.name}"
            choices.append(PieceChoice(exercise, left_out=why))
            continue
        taken |= {name: (value, exercise.name) for name, value in wanted.items()}
        choices.append(PieceChoice(exercise, tuple(word for name, value in wanted.items() for word in (name, *value))))
    return choices[::-1]


def route_options(
    exercise: Exercise, ranks: int, taken: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the options that make a run call the piece, with their values; empty if every run does.

    taken: values chosen already; preferred among a route's alternatives, of which otherwise the first is used.
    """
    options, taken = {}, taken or {}
    for name, values in _route(exercise, ranks).items():
        given = taken.get(name, ())
        fits = len(given) == len(values) and all(one in may for one, may in zip(given, values, strict=True))
        options[name] = given if fits else tuple(may[0] for may in values)
    return options


def _route(exercise: Exercise, ranks: int) -> dict[str, list[list[str]]]:
    """Parse a route: the options, and for each of their values the alternatives."""
    if exercise.route == "always":
        return {}
    shares = " ".join(str(ranks - rank) for rank in range(ranks))
    options: dict[str, list[list[str]]] = {}
    for word in exercise.route.replace("{shares}", shares).replace("{ranks}", str(ranks)).split():
        if word.startswith("--"):
            options[name := word] = []
        else:
            options[name].append(word.split("|"))
    return options


def has_route(exercise: Exercise) -> bool:
    """Whether some options make a training run call the piece."""
    return bool(exercise.route) and not exercise.route.startswith(_NONE)


def read_piece(exercise: Exercise, work: Work) -> LearnerPiece:
    """Read the learner's file for the ranks."""
    file = work.file(exercise)
    return LearnerPiece(exercise.name, exercise.pieces, str(file), file.read_text(), exercise.one_rank)


def train_with_pieces(world: "World", config: "Config", pieces: Sequence[LearnerPiece]) -> None:
    """Install the pieces, train, and print how often each was called; every rank calls it."""
    from minidist import comm
    from minidist.mesh import Mesh
    from minidist.tools.launch.run import train_and_report

    calls = install_pieces(pieces)
    train_and_report(world, config)
    control = comm.bind(world, Mesh(dp=world.size), [])["control"]
    calls_by_rank = comm.all_gather_object(dict(calls), control)
    if world.rank == 0:
        for line in format_calls(pieces, calls_by_rank):
            print(line, flush=True)
    comm.barrier(control)
    unused = [
        piece.name
        for piece in pieces
        if not (any if piece.one_rank else all)(counts.get(piece.name) for counts in calls_by_rank)
    ]
    if unused:
        raise RunError(f"some rank never called {', '.join(unused)}, although this run's options should call it")


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


def format_calls(pieces: Sequence[LearnerPiece], calls_by_rank: Sequence[dict[str, int]]) -> list[str]:
    """Format the number of calls of every piece on every rank, as lines."""
    lines = ["your code trained this model; calls on each rank:"]
    return lines + [
        f"  {piece.name:<22}" + " ".join(f"{counts.get(piece.name, 0):>8,}" for counts in calls_by_rank)
        for piece in pieces
    ]


def _format_choice(choice: PieceChoice) -> str:
    how = choice.left_out or " ".join(choice.options) or "called in every run"
    return f"{'left out' if choice.left_out else 'yours':<9}{choice.exercise.name:<22}{how}"


def passed_pieces(catalogue: Catalogue, work: Work, only: Sequence[str]) -> list[Exercise]:
    """Return the passed pieces, those named in `only` if any are. Raises UserError if there is none."""
    for name in only:
        if catalogue[name].kind != "piece":
            raise UserError(f"{name} is an exercise of kind {catalogue[name].kind}, not a piece of the trainer")
        if not work.entry(catalogue[name]).get("passed"):
            raise UserError(f"you have not passed {name} yet: python -m exercises check {name}")
    passed = [
        exercise
        for exercise in catalogue.values()
        if exercise.kind == "piece"
        and exercise.name in (only or [exercise.name])
        and work.entry(exercise).get("passed")
    ]
    if not passed:
        raise UserError("you have passed no piece yet, so there is nothing to run; python -m exercises list shows all")
    return passed


def conflicting_option(choice: PieceChoice, config: Any, ranks: int) -> str:
    """Return the first option of a piece that the configuration overrides; "" if none."""
    for name, values in _route(choice.exercise, ranks).items():
        value = config
        section, _, field = name.removeprefix("--").rpartition(".")
        for part in filter(None, [*section.split("."), field.removeprefix("no-")]):  # some are in no section
            value = getattr(value, part.replace("-", "_"))
        if not values:  # a flag
            values = [[str(not field.startswith("no-"))]]
        kept = value if isinstance(value, tuple) else (value,)
        same = (any(_same(one, word) for word in may) for one, may in zip(kept, values, strict=False))
        if len(kept) != len(values) or not all(same):
            return " ".join((name, *(" or ".join(may) for may in values)))
    return ""


def _same(value: Any, word: str) -> bool:
    """Whether an option's value equals the word on the command line."""
    if value is None or isinstance(value, bool):
        return str(value) == word
    try:
        return type(value)(word) == value
    except (TypeError, ValueError):
        return False


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
