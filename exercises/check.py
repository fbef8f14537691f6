"""Grades a learner's file: runs every test on fresh ranks and turns every kind of failure into a short finding."""

import ast
import functools
import importlib.util
import marshal
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.catalogue import Exercise, TestCase
from exercises.diagnosis import Run, run_and_diagnose
from exercises.scratch import open_scratch
from exercises.source_check import find_forbidden_code
from exercises.stuck_ranks import find_stuck_ranks, read_world_sizes
from exercises.testing import Finding
from minidist.errors import UserError

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer

CONDITIONS_TEST = "holds_under_every_condition"  # the test that calls `exercises.conditions.check_conditions`
HANG_S = 5.0
MEMORY_BYTES = 1 << 30
# Modules of the grader, preloaded for the ranks.
_GRADER = (
    *("numpy", "exercises.network", "exercises.observations", "exercises.rank_tests", "exercises.side_effects"),
    "exercises.shared_code",  # the last: it remembers the functions of the others
)
PRELOAD = ("torch._dynamo", *_GRADER)  # for any exercise
_PROGRAMS = ("script", "debug")  # kinds whose answers are programs for torchrun
# After these findings the other tests would fail in the same way.
_STOPS_CHECK = ("syntax", "missing", "hang", "printing", "memory", "exit", "breakpoint")
_NOT_RUN = "not run, because of how another test ended"


@dataclass(frozen=True)
class TestResult:
    """The outcome of one test. points: earned, out of `of`; finding: None if it passed."""

    id: str
    description: str
    points: int
    max_points: int
    finding: Finding | None


@dataclass(frozen=True)
class Verdict:
    """The grade of a file. content: of the file, read once for all tests."""

    exercise: Exercise
    content: bytes
    results: Sequence[TestResult]

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.finding is None for result in self.results)

    @property
    def reported(self) -> TestResult | None:
        """The failure to report: the first failed test that was run; None if all passed."""
        failed = [result for result in self.results if result.finding]
        return next((result for result in failed if result.finding.kind != "skipped"), next(iter(failed), None))

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)


def modules_to_preload(exercises: Iterable[Exercise]) -> tuple[str, ...]:
    """Return the modules that a rank server should preload to grade only these exercises.

    They are the grader's, those that hold the pieces and their guarded equivalents, what the tests import, and what
    runs of the exercise import: each rank would do it again.
    """
    exercises = list(exercises)
    found = {module for exercise in exercises for module in (*exercise.modules, *exercise.guarded_modules)}
    for exercise in exercises:
        for node in ast.parse(exercise.test_file.read_text()).body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
    of_tests = sorted(name for name in found if name.split(".")[0] in ("torch", "numpy", "minidist", "exercises"))
    of_runs = sorted({name for exercise in exercises for name in exercise.imports})
    return (*of_tests, *of_runs, *_GRADER)


def check(
    exercise: Exercise,
    answer: Path,
    server: "RankServer",
    *,
    only: Sequence[str] | None = None,
    hang_s: float = HANG_S,
    stop: bool = False,
    measured: Mapping[str, list[int]] | None = None,
    condition: str | None = None,
) -> Verdict:
    """Run the exercise's tests on the file `answer`; return the verdict, which depends only on the file.

    server: started with `modules_to_preload`, so that ranks start fast. only: run only these tests. hang_s: seconds
    without progress after which ranks count as hanging. stop: at the first finding. measured: earlier results of a
    prediction's scenarios; None: run them. condition: the only kind of `exercises.conditions` to check; None for all.
    """
    answer = answer.resolve()
    if not answer.is_file():
        raise UserError(f"{answer} is not there: python -m exercises start copies the stubs")
    tests = [test for test in exercise.tests() if only is None or test.id in only]
    content = answer.read_bytes()
    if reached := find_forbidden_code(content):
        return Verdict(exercise, content, _results(tests, _forbidden_code_findings(tests, content, *reached)))
    if exercise.kind == "predict" and measured is None:
        measured = find_stuck_ranks(exercise.source, [test.id for test in tests], server)
    faulty_lines = stubs.faulty_lines(exercise) if exercise.fault else None
    sizes = read_world_sizes(exercise.source) if exercise.kind == "predict" else None
    offered, secret = {"measured": measured, "sizes": sizes, "faulty_lines": faulty_lines}, _secret(exercise, answer)
    with open_scratch(server) as folder:
        # A copy, as the learner may edit the file. It keeps the last two parts of the path, which messages show.
        copy = folder.write(f"{answer.parent.name}/{answer.name}", content)

        def run(ids: Sequence[str], size: int) -> Finding | None:
            with open_scratch(server, writable=True) as place:
                request = _request(exercise, ids, copy, secret, place.path, offered, condition)
                return run_and_diagnose(Run(request, place, content), size, server, hang_s)

        return Verdict(exercise, content, _results(tests, _findings(tests, run, stop)))


def _findings(
    tests: Sequence[TestCase], run: Callable[[Sequence[str], int], Finding | None], stop: bool
) -> dict[str, Finding]:
    """Return each failed test's finding, by name. run: runs some tests on a number of ranks until the first finding."""
    findings: dict[str, Finding] = {}
    for size in sorted({size for test in tests for size in test.ranks}):
        remaining = [test.id for test in tests if size in test.ranks and test.id not in findings]
        while remaining and (finding := run(remaining, size)) is not None:
            if finding.test not in remaining:
                finding.test = remaining[0]
            findings[finding.test] = finding
            remaining = remaining[remaining.index(finding.test) + 1 :]
            if stop or finding.kind in _STOPS_CHECK:
                for test in _unfinished(tests, size, finding.test):
                    findings.setdefault(test.id, Finding("skipped", _NOT_RUN, test=test.id))
                return findings
    return findings


def _forbidden_code_findings(tests: Sequence[TestCase], content: bytes, line: int, what: str) -> dict[str, Finding]:
    """Return the findings on an answer that was not run: the first test reports the line, the others are skipped."""
    source = content.decode(errors="replace").splitlines()[line - 1].strip()[:100]
    findings = {test.id: Finding("skipped", _NOT_RUN, test=test.id) for test in tests}
    findings[tests[0].id] = Finding("forbidden", what, line=line, source=source, test=tests[0].id)
    return findings


def _unfinished(tests: Sequence[TestCase], size: int, last: str) -> list[TestCase]:
    """Return the tests still to run on some world size when test `last` has stopped the check on `size` ranks."""
    stop = next(place for place, test in enumerate(tests) if test.id == last)
    return [test for place, test in enumerate(tests) if (max(test.ranks), place) >= (size, stop)]


def _results(tests: Sequence[TestCase], findings: dict[str, Finding]) -> list[TestResult]:
    return [
        TestResult(
            test.id, test.description, 0 if test.id in findings else test.points, test.points, findings.get(test.id)
        )
        for test in tests
    ]


def _secret(exercise: Exercise, answer: Path) -> tuple[str, ...]:
    """Return the files and folders of solutions and grader, which an answer must not read."""
    secret = [exercise.root / "solutions", exercise.root / "chapters", *exercise.folder.parent.glob("*/answers")]
    secret += [exercise.test_file, *exercise.sources]
    secret += [Path(importlib.util.cache_from_source(str(source))) for source in exercise.sources]
    if len(answer.parents) > 2:  # the learner's notebooks, beside work/exercises
        secret.append(answer.parents[2] / "chapters")
    return tuple(str(path) for path in secret)


@functools.cache
def compile_tests(text: str, file: str) -> bytes:
    """Return the code of a test file as `marshal` writes it: each rank would take 6 ms to compile it."""
    return marshal.dumps(compile(text, file, "exec"))


def _request(
    exercise: Exercise,
    tests: Sequence[str],
    answer: str,
    secret: tuple[str, ...],
    folder: str,
    offered: dict,
    condition: str | None,
):
    from exercises.rank_tests import Request

    test_file = str(exercise.test_file)
    return Request(
        answer, test_file, compile_tests(exercise.test_file.read_text(), test_file), tuple(tests), exercise.symbols,
        exercise.pieces, exercise.guards, secret, folder, MEMORY_BYTES, secrets.token_hex(),
        exercise.kind in _PROGRAMS, offered, condition,
    )  # fmt: skip
