"""The catalogue of exercises: reads and validates the `exercise.toml` of every chapter folder.

A missing or unknown key, a value of the wrong type, and an exercise without hints or tests are errors. Reading does not
import torch: symbols and tests are found in the source text.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from exercises.source_check import parse_python
from exercises.testing import CONDITION_RANKS
from minidist.errors import UserError, suggest

ROOT = Path(__file__).resolve().parents[1]
_COMMON = ("kind", "title", "section", "difficulty", "minutes", "points", "why", "hints")
# The additional required keys of each kind of exercise.
KINDS = {
    "piece": ("piece", "statement", "calls", "guards", "blank"),
    "script": ("route", "defines", "guards", "changes", "fails"),
    "debug": ("route", "defines", "guards", "changes", "fails", "fault"),
    "predict": ("route", "changes"),
}
_OPTIONAL = {"piece": ("also", "optional", "route"), "debug": ("also_faulty",)}
NONE = "none: "  # before the reason of a route
# The constants that the learner fills in, by kind.
_CONSTANTS = {"debug": ("INVARIANT", "LINE"), "predict": ("ANSWERS",)}
_MIN_HINTS = 2


@dataclass(frozen=True)
class Change:
    """Lines that the stub replaces by `put`: from the one that begins with `first` to the one that begins with `last`.

    In a piece they are called `blank` and have `say` instead of `put`: the message of the NotImplementedError that the
    stub raises there.
    """

    first: str
    last: str
    put: str


@dataclass(frozen=True)
class TestCase:
    """A function of the test file. points: its worth. ranks: the world sizes it runs on. description: its docstring."""

    id: str
    points: int
    ranks: tuple[int, ...]
    description: str


@dataclass(frozen=True)
class Exercise:
    """One table of an exercise.toml.

    kind: "piece", a symbol of the package with blank lines; "script", a program to repair; "debug", a debugging
    exercise: a program whose loss falls but whose numbers or costs are wrong, where the learner names the violated
    invariant and the faulty line and repairs it; "predict", scenarios whose outcome the learner predicts.
    piece: the symbol to write, `module:symbol`. also: further symbols that belong to it, of any module.
    statement: what to build, an example with numbers, and what the answer is judged by. calls: the functions that the
    blank lines may call, with signatures. guards: forbidden ready-made equivalents (`numpy.array_split`). optional:
    whether the course goes on without it.
    defines: the functions a program must keep. changes: from the solution to the stub. fails: the test that the stub of
    a program must fail. fault: the faulty line of a debugging exercise's stub; also_faulty: other lines that may be
    blamed, as the fault lies in what they do together.
    imports: modules that ranks import while they run the tests, at a cost, as the first step of an optimizer imports
    torch._dynamo (0.6 s); a rank server preloads them, see `exercises.check.modules_to_preload`.
    route: empty for a piece that some layout of the simple trainer calls (see `exercises.layouts`); otherwise "none: "
    and the reason why no training run calls the answer.
    why: the solution's note.
    """

    name: str
    folder: Path
    kind: str
    title: str
    section: str
    difficulty: int
    minutes: int
    points: int
    why: str
    hints: tuple[str, ...]
    changes: tuple[Change, ...]
    route: str = ""
    piece: str = ""
    also: tuple[str, ...] = ()
    statement: str = ""
    calls: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    fails: str = ""
    fault: str = ""
    also_faulty: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether runs of the simple trainer can call the answer."""
        return self.kind == "piece" and not self.route.startswith(NONE)

    @property
    def chapter(self) -> str:
        """The name of the chapter's folder, such as "ch03_communication"."""
        return self.folder.name

    @property
    def root(self) -> Path:
        """The folder that holds `exercises/` and `solutions/`."""
        return self.folder.parents[1]

    @property
    def stub(self) -> Path:
        """The file from which the learner starts."""
        return self.folder / f"{self.name}.py"

    @property
    def test_file(self) -> Path:
        """The file with the tests of the exercise."""
        return self.folder / f"test_{self.name}.py"

    @property
    def solution(self) -> Path:
        """The file with the solution."""
        return self.root / "solutions" / self.chapter / f"{self.name}.py"

    @property
    def answers(self) -> Path:
        """The file of right and wrong answers: see `exercises.answers`."""
        return self.folder / "answers" / f"{self.name}.toml"

    @property
    def pieces(self) -> tuple[str, ...]:
        """The package's symbols that the answer replaces, `module:symbol`; empty unless the kind is "piece"."""
        return (*self.also, self.piece) if self.piece else ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names that a learner's file must define; names in capitals are constants."""
        names = tuple(piece.split(":")[1] for piece in self.pieces)
        return (*names, *self.defines, *_CONSTANTS.get(self.kind, ()))

    @property
    def module(self) -> str:
        """The module that defines the piece; "" without a piece."""
        return self.piece.split(":")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that define the symbols of a piece, without duplicates."""
        return tuple(dict.fromkeys(piece.split(":")[0] for piece in self.pieces))

    @property
    def guarded_modules(self) -> tuple[str, ...]:
        """The modules that hold the forbidden ready-made equivalents, without duplicates."""
        return tuple(dict.fromkeys(split_owner(name)[0] for name in self.guards))

    @property
    def source(self) -> Path:
        """The file that the solution is generated from: the module of a piece, else a program beside the stub."""
        if self.piece:
            return module_file(self.module)
        return self.folder / "programs" / f"{self.name}.py"

    @property
    def sources(self) -> tuple[Path, ...]:
        """All files that the solution is generated from."""
        return tuple(map(module_file, self.modules)) or (self.source,)

    def tests(self) -> list[TestCase]:
        """List the tests in file order. Raises UserError if their points do not add up to those of the exercise."""
        found = [
            case for node in parse_python(self.test_file.read_text()).body if (case := _parse_test_case(node, self))
        ]
        if sum(case.points for case in found) != self.points:
            total = sum(case.points for case in found)
            raise UserError(f"{self.test_file} gives {total} points in all, exercise.toml says {self.points}")
        return found


def module_file(module: str) -> Path:
    """Return the source file of a module."""
    return (ROOT / Path(*module.split("."))).with_suffix(".py")


class Catalogue(Mapping[str, Exercise]):
    """All exercises by name, in the order of chapters and files. Raises UserError for an invalid file."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._exercises: dict[str, Exercise] = {}
        for file in sorted((root / "exercises").glob("ch*/exercise.toml")):
            for exercise in _read_exercises(file):
                if exercise.name in self._exercises:
                    raise UserError(f"{file} has an exercise {exercise.name}, and another chapter has one as well")
                self._exercises[exercise.name] = exercise

    def __getitem__(self, name: str) -> Exercise:
        if name not in self._exercises:
            raise UserError(f"there is no exercise {name!r}; {suggest(name, self._exercises)}")
        return self._exercises[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._exercises)

    def __len__(self) -> int:
        return len(self._exercises)


def _read_exercises(file: Path) -> list[Exercise]:
    """Return the exercises in an exercise.toml. Raises UserError for an invalid file."""
    try:
        tables = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    return [_make_exercise(name, table, file) for name, table in tables.items()]


def _make_exercise(name: str, table: object, file: Path) -> Exercise:
    """Return the exercise in the table `[name]` of `file`. Raises UserError for an invalid table."""
    where = f"{file}: [{name}]"
    if not isinstance(table, dict):
        raise UserError(f"{where} is no table")
    kind = table.get("kind")
    if kind not in KINDS:
        raise UserError(f"{where} kind must be one of {', '.join(KINDS)}, not {kind!r}")
    needed = {*_COMMON, *KINDS[kind]}
    allowed = {*needed, "imports", *_OPTIONAL.get(kind, ())}
    unknown, missing = table.keys() - allowed, needed - table.keys()
    if unknown or missing:
        problems = [f"unknown {sorted(unknown)}"] * bool(unknown) + [f"missing {sorted(missing)}"] * bool(missing)
        raise UserError(f"{where} has {' and '.join(problems)}; the keys of a {kind} are {', '.join(sorted(allowed))}")
    types = {f.name: f.type for f in fields(Exercise)}
    values = {
        key: _convert_value(value, types[key], f"{where} {key}") for key, value in table.items() if key != "blank"
    }
    if "blank" in table:
        blank = _check_tables(table["blank"], ("first", "last", "say"), f"{where} blank")
        values["changes"] = tuple(Change(b["first"], b["last"], _make_raise_statement(b["say"])) for b in blank)
    exercise = Exercise(name=name, folder=file.parent, **values)
    _check_exercise(exercise, where)
    return exercise


def _make_raise_statement(say: str) -> str:
    """Return the statement that stands for blank lines in a stub. say: its message."""
    return f'raise NotImplementedError("{say}")'


def _convert_value(value: object, kind: object, where: str) -> object:
    """Return a TOML value as a value of type `kind`. Raises UserError. where: names the key in the message."""
    if kind == tuple[Change, ...]:
        return tuple(Change(**change) for change in _check_tables(value, ("first", "last", "put"), where))
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{where} must be a list of texts")
        return tuple(value)
    if type(value) is not kind:
        raise UserError(f"{where} must be a {kind.__name__}, not {value!r}")
    return value


def _check_tables(value: object, keys: tuple[str, ...], where: str) -> list[dict[str, str]]:
    """Return `value` if it is a list of tables with exactly these keys. Raises UserError if not."""
    if not isinstance(value, list) or not all(isinstance(table, dict) and {*keys} == {*table} for table in value):
        raise UserError(f"{where} must be a list of tables with the keys {', '.join(keys)}")
    return value


def _check_exercise(exercise: Exercise, where: str) -> None:
    """Raise UserError for values out of range and for missing files."""
    if not 1 <= exercise.difficulty <= 5 or exercise.minutes < 1 or exercise.points < 1:
        raise UserError(f"{where} difficulty must be 1 to 5, minutes and points at least 1")
    if len(exercise.hints) < _MIN_HINTS or not all(hint.strip() for hint in exercise.hints):
        raise UserError(f"{where} needs at least {_MIN_HINTS} hints")
    if not exercise.changes:
        raise UserError(f"{where} leaves the learner nothing to do: no line is blank or changed")
    if exercise.kind == "piece" and not all(":" in piece for piece in exercise.pieces):
        raise UserError(f"{where} piece and also must be module:symbol")
    if exercise.route and not exercise.route.startswith(NONE):
        raise UserError(f"{where} route must begin with {NONE!r} and say why no training run calls the answer")
    for file, what in ((exercise.test_file, "tests"), *((file, "right text") for file in exercise.sources)):
        if not file.exists():
            raise UserError(f"{where} has no {what}: {file} is not there")
    if "fails" in KINDS[exercise.kind] and exercise.fails not in [test.id for test in exercise.tests()]:
        raise UserError(f"{where} fails must be one of its tests, not {exercise.fails!r}")
    if "fault" in KINDS[exercise.kind] and not exercise.fault:
        raise UserError(f"{where} fault must be the line of the stub that is to be found")


def split_owner(name: str) -> tuple[str, list[str]]:
    """Split the dotted name of a function or class into that of its module and the parts within it.

    A part that begins with a capital is a class, as in `torch.Tensor.chunk`; all before the first class, or before the
    function, is the module.
    """
    *path, last = name.split(".")
    classes = [place for place, part in enumerate(path) if part[0].isupper()]
    end = classes[0] if classes else len(path)
    return ".".join(path[:end]), [*path[end:], last]


def _parse_test_case(node: ast.stmt, exercise: Exercise) -> TestCase | None:
    """Return the test in a function decorated with `@test(points=2, ranks=(1, 2))`; None for other statements."""
    decorators = getattr(node, "decorator_list", [])
    for call in decorators:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "test":
            constants = {"CONDITION_RANKS": CONDITION_RANKS}
            options = {
                each.arg: constants[each.value.id] if isinstance(each.value, ast.Name) else ast.literal_eval(each.value)
                for each in call.keywords
            }
            description = (ast.get_docstring(node) or "").split("\n")[0]
            if not description:
                raise UserError(f"{exercise.test_file}: {node.name} has no docstring, which is what a learner reads")
            return TestCase(node.name, options["points"], tuple(options.get("ranks", (1,))), description)
    return None
