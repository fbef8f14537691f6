"""What exercises there are: `exercise.toml` of every chapter folder, read and checked to the letter.

A key that is missing, unknown or of another type is an error, and so is an exercise without hints or tests. Reading
imports neither torch nor the package: pieces and tests are found in the source text.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from minidist.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("piece",)
_MIN_HINTS = 2


@dataclass(frozen=True)
class Blank:
    """Lines of a piece that the learner writes: from the line that begins with `first` to the one with `last`.

    say: what these lines have to do; the stub raises NotImplementedError with it.
    """

    first: str
    last: str
    say: str


@dataclass(frozen=True)
class TestCase:
    """A function of the test file: its name, the points it is worth, and the numbers of ranks it runs on."""

    id: str
    points: int
    ranks: tuple[int, ...]
    says: str


@dataclass(frozen=True)
class Exercise:
    """One table of an exercise.toml.

    piece: the symbol to write, `module:symbol`; also: further symbols of the same module that belong to it.
    calls: what the blank lines may call. guards: ready-made equivalents (`numpy.array_split`) that are no answer.
    route: the trainer's option that runs the piece, or `none: ` and why there is none. why: the solution's note.
    """

    name: str
    folder: Path
    kind: str
    title: str
    section: str
    difficulty: int
    minutes: int
    points: int
    piece: str
    calls: tuple[str, ...]
    guards: tuple[str, ...]
    route: str
    why: str
    hints: tuple[str, ...]
    blank: tuple[Blank, ...]
    also: tuple[str, ...] = ()

    @property
    def chapter(self) -> str:
        return self.folder.name

    @property
    def root(self) -> Path:
        """The folder that holds `exercises/`, `solutions/` and `tests/answers/`."""
        return self.folder.parents[1]

    @property
    def stub(self) -> Path:
        return self.folder / f"{self.name}.py"

    @property
    def test_file(self) -> Path:
        return self.folder / f"test_{self.name}.py"

    @property
    def solution(self) -> Path:
        return self.root / "solutions" / self.chapter / f"{self.name}.py"

    @property
    def answers(self) -> Path:
        return self.root / "tests" / "answers" / self.chapter / self.name

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names a learner's file must define."""
        return tuple(piece.split(":")[1] for piece in (*self.also, self.piece))

    @property
    def module(self) -> str:
        return self.piece.split(":")[0]

    def tests(self) -> list[TestCase]:
        """The tests in the order of their file. Raises UserError when the file has none or its points do not add up."""
        found = [case for node in ast.parse(self.test_file.read_text()).body if (case := _test_case(node, self))]
        if sum(case.points for case in found) != self.points:
            total = sum(case.points for case in found)
            raise UserError(f"{self.test_file} gives {total} points in all, exercise.toml says {self.points}")
        return found


class Catalogue(Mapping[str, Exercise]):
    """All exercises by name, in the order of their chapters and files. Raises UserError for a file that is wrong."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._exercises: dict[str, Exercise] = {}
        for file in sorted((root / "exercises").glob("ch*/exercise.toml")):
            for exercise in _read(file):
                if exercise.name in self._exercises:
                    raise UserError(f"{file} has an exercise {exercise.name}, and another chapter has one as well")
                self._exercises[exercise.name] = exercise

    def __getitem__(self, name: str) -> Exercise:
        if name not in self._exercises:
            raise UserError(f"there is no exercise {name!r}; there are {', '.join(self._exercises) or 'none'}")
        return self._exercises[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._exercises)

    def __len__(self) -> int:
        return len(self._exercises)


def _read(file: Path) -> list[Exercise]:
    try:
        tables = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    return [_exercise(name, table, file) for name, table in tables.items()]


def _exercise(name: str, table: object, file: Path) -> Exercise:
    where = f"{file}: [{name}]"
    if not isinstance(table, dict):
        raise UserError(f"{where} is no table")
    wanted = {f.name: f for f in fields(Exercise) if f.name not in ("name", "folder")}
    unknown, missing = table.keys() - wanted.keys(), wanted.keys() - table.keys() - {"also"}
    if unknown or missing:
        told = [f"unknown {sorted(unknown)}"] * bool(unknown) + [f"missing {sorted(missing)}"] * bool(missing)
        raise UserError(f"{where} has {' and '.join(told)}; the keys are {', '.join(wanted)}")
    values = {key: _value(value, wanted[key].type, f"{where} {key}") for key, value in table.items()}
    exercise = Exercise(name=name, folder=file.parent, **values)
    _check(exercise, where)
    return exercise


def _value(value: object, kind: object, where: str) -> object:
    if kind == tuple[Blank, ...]:
        keys = {f.name for f in fields(Blank)}
        if not isinstance(value, list) or not all(isinstance(b, dict) and b.keys() == keys for b in value):
            raise UserError(f"{where} must be a list of tables with the keys {', '.join(sorted(keys))}")
        return tuple(Blank(**blank) for blank in value)
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{where} must be a list of texts")
        return tuple(value)
    if type(value) is not kind:
        raise UserError(f"{where} must be a {kind.__name__}, not {value!r}")
    return value


def _check(exercise: Exercise, where: str) -> None:
    if exercise.kind not in KINDS:
        raise UserError(f"{where} kind must be one of {', '.join(KINDS)}, not {exercise.kind!r}")
    if not 1 <= exercise.difficulty <= 5 or exercise.minutes < 1 or exercise.points < 1:
        raise UserError(f"{where} difficulty must be 1 to 5, minutes and points at least 1")
    if len(exercise.hints) < _MIN_HINTS or not all(hint.strip() for hint in exercise.hints):
        raise UserError(f"{where} needs at least {_MIN_HINTS} hints")
    if not exercise.blank:
        raise UserError(f"{where} leaves no line blank")
    if not all(":" in piece and piece.split(":")[0] == exercise.module for piece in (exercise.piece, *exercise.also)):
        raise UserError(f"{where} piece and also must be module:symbol, of one module")
    if not exercise.test_file.exists():
        raise UserError(f"{where} has no tests: {exercise.test_file} is not there")


def _test_case(node: ast.stmt, exercise: Exercise) -> TestCase | None:
    """The test that a function is, by its decorator `@test(points=2, ranks=(1, 2))`; None for other statements."""
    decorators = getattr(node, "decorator_list", [])
    for call in decorators:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "test":
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            says = (ast.get_docstring(node) or "").split("\n")[0]
            if not says:
                raise UserError(f"{exercise.test_file}: {node.name} has no docstring, which is what a learner reads")
            return TestCase(node.name, options["points"], tuple(options.get("ranks", (1,))), says)
    return None
