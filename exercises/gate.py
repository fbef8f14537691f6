"""The gate: tests the graders of all exercises with right and wrong answers.

For every exercise the stub must fail for the declared reason, the solution and the other right answers must pass, and
each wrong answer must fail the test that it names. A gate that has checked nothing is red.

The declared reason: every test of a piece or a prediction finds the stub unwritten. The stub of a script or a debugging
exercise is complete but wrong, and fails the test that exercise.toml names in `fails`.

Every exercise has these three wrong answers, each with the test that catches it:
* wrong_zero does nothing: a piece returns zeros, a program does not train, a prediction says that no rank waits;
* wrong_constant ignores its input: a piece returns one value, a program one set of parameters, a debugging exercise
  gives every fault one name, a prediction names all ranks everywhere;
* wrong_cheat has the values without the work. A piece calls the package's own symbol, and must be found forbidden, as
  must every wrong_cheat_* that tries to evade the guard. In a script every rank computes everything itself; a debugging
  exercise hides the symptom and keeps the fault; a prediction changes the scenario.

A wrong answer that is broken (it raises, does not parse, ...) could fail any test, so it must declare its `finding`.
The answers are in `exercises/<chapter>/answers/`: see `exercises.answers`.
"""

import ast
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import report, stubs
from exercises.answers import Answer, read_answers
from exercises.catalogue import Exercise
from exercises.check import Verdict, check
from exercises.new import find_placeholders
from exercises.stuck_ranks import find_stuck_ranks
from minidist.errors import UserError

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer

_MIN_RIGHT = 2
_MIN_WRONG = 4
# Findings that any test makes of a broken file.
_BROKEN = ("raised", "syntax", "missing", "unwritten", "died")
_ALWAYS_WRONG = ("wrong_zero", "wrong_constant", "wrong_cheat")


@dataclass
class Gate:
    """Checks the graders of exercises; counts the checked exercises and collects the problems.

    right_answers: whether to check the right answers besides the solution. everything_else: whether to check the stub,
    the solution and the wrong answers.
    """

    server: "RankServer"
    right_answers: bool = True
    everything_else: bool = True
    checked: int = 0
    problems: list[str] = field(default_factory=list)
    _measured: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    @property
    def green(self) -> bool:
        """Whether at least one exercise was checked and no problem was found."""
        return self.checked > 0 and not self.problems

    def run(self, exercises: Iterable[Exercise]) -> bool:
        """Check all exercises; return whether the gate is green."""
        for exercise in exercises:
            if self.everything_else:
                self._check_generated_files(exercise)
                self._check_wrong_answers(exercise)
            self._check_right_answers(exercise)
            self.checked += 1
        if not self.checked:
            self.problems.append("no exercise was checked")
        return self.green

    def _check_generated_files(self, exercise: Exercise) -> None:
        """Check that generated files are up to date, no placeholder is left, and the stub and an empty answer fail."""
        for file in stubs.outdated_files(exercise):
            what = "is not what the package generates now: run python -m exercises generate"
            self._add_problem(exercise, f"{file.name} of {file.parent.name} {what}")
        for text in find_placeholders(exercise):
            self._add_problem(exercise, text)
        self._check_stub(exercise)
        with tempfile.TemporaryDirectory() as folder:
            nothing = Path(folder, f"{exercise.name}.py")
            nothing.write_text(stubs.generate_empty_answer(exercise))
            for result in self._grade(exercise, nothing).results:
                if result.finding is None:
                    self._add_problem(exercise, f"an empty answer passes {result.id}")

    def _check_stub(self, exercise: Exercise) -> None:
        """Check that the stub fails for the declared reason."""
        for result in self._grade(exercise, exercise.stub).results:
            kind = result.finding.kind if result.finding else "nothing wrong"
            if not exercise.fails and kind != "unwritten":
                self._add_problem(exercise, f"the stub must fail {result.id} as unwritten, and it is told: {kind}")
            if result.id == exercise.fails and kind in ("nothing wrong", "unwritten", "missing", "skipped"):
                self._add_problem(exercise, f"the stub must fail {result.id} for its fault, and it is told: {kind}")

    def _check_right_answers(self, exercise: Exercise) -> None:
        """Check that the solution and all other right answers pass, and are different programs."""
        right = read_answers(exercise).right
        if len(right) < _MIN_RIGHT:
            self._add_problem(
                exercise, f"{len(right)} right answers besides the solution; at least {_MIN_RIGHT} are needed"
            )
        seen: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            files = [self._write_answer(exercise, answer, folder) for answer in right]
            for file in [exercise.solution, *filter(None, files)]:
                code = _strip_comments(file)
                if code in seen:
                    self._add_problem(exercise, f"{file.stem} is the same program as {seen[code]}")
                seen[code] = file.stem
                if not (self.everything_else if file == exercise.solution else self.right_answers):
                    continue
                for result in self._grade(exercise, file).results:
                    if result.finding is not None:
                        told = " / ".join(report.format_finding(result.finding))
                        self._add_problem(exercise, f"{file.stem} is right and fails {result.id}: {told}")

    def _check_wrong_answers(self, exercise: Exercise) -> None:
        """Check that the wrong answers that each exercise needs are there, and that each is caught."""
        wrong = {answer.name: answer for answer in read_answers(exercise).wrong}
        for name in _ALWAYS_WRONG:
            if name not in wrong:
                self._add_problem(exercise, f"{name} is missing")
        if len(wrong.keys() - set(_ALWAYS_WRONG)) < _MIN_WRONG:
            self._add_problem(
                exercise, f"at least {_MIN_WRONG} wrong answers are needed besides {', '.join(_ALWAYS_WRONG)}"
            )
        ids = [test.id for test in exercise.tests()]
        with tempfile.TemporaryDirectory() as folder:
            for answer in wrong.values():
                if answer.caught_by not in ids or not answer.note:
                    self._add_problem(exercise, f"{answer.name} must name the test that catches it, and what is wrong")
                elif file := self._write_answer(exercise, answer, folder):
                    self._check_caught(exercise, answer, file)

    def _check_caught(self, exercise: Exercise, answer: Answer, file: Path) -> None:
        """Check that a wrong answer fails the test that it names, with the finding that it names."""
        test, kind, name = answer.caught_by, answer.finding, answer.name
        caught = {r.id: r.finding.kind for r in self._grade(exercise, file, [test]).results if r.finding}
        if caught.get(test, "skipped") == "skipped":
            self._add_problem(exercise, f"{name} is wrong and passes {test}, which must catch it")
        elif caught[test] != kind and (kind or caught[test] in _BROKEN):
            told = f'it must have finding = "{caught[test]}" if that is its fault'
            self._add_problem(exercise, f"{name} is caught as {caught[test]}; {told}")
        elif name.startswith("wrong_cheat") and exercise.kind == "piece" and caught[test] != "forbidden":
            self._add_problem(exercise, f"{name} is caught as {caught[test]}, not as forbidden")

    def _write_answer(self, exercise: Exercise, answer: Answer, folder: str) -> Path | None:
        """Write an answer to a file; record a problem and return None if its edits do not apply."""
        try:
            return stubs.write_answer(exercise, answer.name, Path(folder))
        except UserError as error:
            self._add_problem(exercise, str(error))
            return None

    def _grade(self, exercise: Exercise, file: Path, only: list[str] | None = None) -> Verdict:
        """Grade a file; record a problem if the message is too long or says nothing. only: run only these tests."""
        if exercise.kind == "predict" and exercise.name not in self._measured:  # once for all answers
            names = [test.id for test in exercise.tests()]
            self._measured[exercise.name] = find_stuck_ranks(exercise.source, names, self.server)
        verdict = check(exercise, file, self.server, only=only, measured=self._measured.get(exercise.name))
        lines = len(report.format_verdict(verdict, len(exercise.hints)).splitlines())
        if lines > report.MAX_LINES:
            self._add_problem(
                exercise, f"the message for {file.name} has {lines} lines; at most {report.MAX_LINES} are read"
            )
        if verdict.reported and verdict.reported.finding.kind == "skipped":
            self._add_problem(exercise, f"the message for {file.name} does not say what was found")
        return verdict

    def _add_problem(self, exercise: Exercise, text: str) -> None:
        """Record a problem of an exercise."""
        self.problems.append(f"{exercise.name}: {text}")


def _strip_comments(file: Path) -> str:
    """Return the program without comments and docstrings."""
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError:
        return file.read_text()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
