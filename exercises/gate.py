"""The project's check of its own checks: what must pass passes, and what must fail fails where it should.

For every exercise: the stub fails for the declared reason, the solution passes, right answers that differ from it pass,
and each wrong one fails the test that it names. A gate that has checked nothing is red.
"""

import ast
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import report, stubs
from exercises.catalogue import Exercise
from exercises.check import Verdict, check

if TYPE_CHECKING:
    from minidist.train.launch import RankServer

_MIN_RIGHT = 2
_MIN_WRONG = 4
# Besides the wrong answers that an exercise thinks of: what nobody may be paid for.
_ALWAYS_WRONG = ("wrong_zero", "wrong_constant", "wrong_cheat")


@dataclass
class Gate:
    """What was checked, and what is not as it must be. It is green when something was checked and nothing is wrong."""

    server: "RankServer"
    checked: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        return self.checked > 0 and not self.problems

    def run(self, exercises: Iterable[Exercise]) -> bool:
        """Check them all; returns whether the gate is green."""
        for exercise in exercises:
            self._generated(exercise)
            self._right(exercise)
            self._wrong(exercise)
            self.checked += 1
        if not self.checked:
            self.problems.append("no exercise was checked")
        return self.green

    def _generated(self, exercise: Exercise) -> None:
        for file in stubs.drift(exercise):
            self._problem(exercise, f"{file.name} of {file.parent.name} is not what the package generates now")
        for result in self._verdict(exercise, exercise.stub).results:
            if result.finding is None or result.finding.kind != "unwritten":
                kind = result.finding.kind if result.finding else "nothing wrong"
                self._problem(exercise, f"the stub must fail {result.id} as unwritten, and it is told: {kind}")
        with tempfile.TemporaryDirectory() as folder:
            nothing = Path(folder, f"{exercise.name}.py")
            nothing.write_text(stubs.empty(exercise))
            for result in self._verdict(exercise, nothing).results:
                if result.finding is None:
                    self._problem(exercise, f"an empty answer passes {result.id}")

    def _right(self, exercise: Exercise) -> None:
        right = sorted(exercise.answers.glob("right_*.py"))
        if len(right) < _MIN_RIGHT:
            self._problem(
                exercise, f"{len(right)} right answers besides the solution; at least {_MIN_RIGHT} are needed"
            )
        seen: dict[str, Path] = {}
        for file in [exercise.solution, *right]:
            code = _code(file)
            if code in seen:
                self._problem(exercise, f"{file.name} is the same program as {seen[code].name}")
            seen[code] = file
            for result in self._verdict(exercise, file).results:
                if result.finding is not None:
                    told = " / ".join(report.message(result.finding))
                    self._problem(exercise, f"{file.name} is right and fails {result.id}: {told}")

    def _wrong(self, exercise: Exercise) -> None:
        wrong = {file.stem: file for file in sorted(exercise.answers.glob("wrong_*.py"))}
        for name in _ALWAYS_WRONG:
            if name not in wrong:
                self._problem(exercise, f"{name}.py is missing")
        if len(wrong.keys() - set(_ALWAYS_WRONG)) < _MIN_WRONG:
            self._problem(
                exercise, f"at least {_MIN_WRONG} wrong answers are needed besides {', '.join(_ALWAYS_WRONG)}"
            )
        ids = [test.id for test in exercise.tests()]
        for file, (test, says) in zip(wrong.values(), stubs.wrong_answers(exercise), strict=True):
            if test not in ids or not says:
                self._problem(exercise, f"{file.name} must begin with `<test that catches it>: <what is wrong>`")
                continue
            caught = {r.id: r.finding.kind for r in self._verdict(exercise, file, [test]).results if r.finding}
            if caught.get(test, "skipped") == "skipped":
                self._problem(exercise, f"{file.name} is wrong and passes {test}, which must catch it")
            elif file.stem == "wrong_cheat" and caught[test] != "forbidden":
                self._problem(exercise, f"{file.name} is caught as {caught[test]}, not as forbidden")

    def _verdict(self, exercise: Exercise, file: Path, only: list[str] | None = None) -> Verdict:
        verdict = check(exercise, file, self.server, only=only)
        lines = len(report.text(verdict, len(exercise.hints)).splitlines())
        if lines > report.MAX_LINES:
            self._problem(
                exercise, f"the message for {file.name} has {lines} lines; at most {report.MAX_LINES} are read"
            )
        return verdict

    def _problem(self, exercise: Exercise, text: str) -> None:
        self.problems.append(f"{exercise.name}: {text}")


def _code(file: Path) -> str:
    """The program without comments and docstrings."""
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError:
        return file.read_text()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
