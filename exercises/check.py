"""Judge a learner's file: every test in fresh ranks, and every way to fail as one short finding."""

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.catalogue import Exercise, TestCase
from exercises.ending import judge
from exercises.measure import measure
from exercises.reach import forbidden
from exercises.testing import Finding
from minidist.errors import UserError

if TYPE_CHECKING:
    from minidist.train.launch import RankServer

HANG_S = 5.0
MEMORY_BYTES = 1 << 30
# What ranks find imported. torch's optimizers import torch._dynamo, a second in every rank that finds it missing.
_ALWAYS = (
    *("numpy", "minidist.data.partition", "minidist.parallel.buckets", "minidist.train.loss"),
    *("exercises.network", "exercises.observed", "exercises.rankside"),
)
PRELOAD = (*_ALWAYS, "torch._dynamo")
_PROGRAMS = ("script", "clinic")  # kinds whose answers are programs as torchrun starts them
# After these the other tests would end alike.
_ENOUGH = ("syntax", "missing", "hang", "printing", "memory", "exit")
_SKIPPED = "not run, because of how another test ended"


@dataclass(frozen=True)
class TestResult:
    """How one test ended. points: earned, of `of`; finding: None when it passed."""

    id: str
    says: str
    points: int
    of: int
    finding: Finding | None


@dataclass(frozen=True)
class Verdict:
    """How a file was judged. content: what it was when it was read, once for all tests."""

    exercise: Exercise
    content: bytes
    results: Sequence[TestResult]

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.finding is None for result in self.results)

    @property
    def shown(self) -> TestResult | None:
        """The failure to tell: the first test that found something itself; None when all passed."""
        failed = [result for result in self.results if result.finding]
        return next((result for result in failed if result.finding.kind != "skipped"), next(iter(failed), None))

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)


def preload(exercise: Exercise) -> tuple[str, ...]:
    """What a server preloads that judges this exercise alone: PRELOAD, or less when it needs less."""
    return PRELOAD if exercise.kind in _PROGRAMS else _ALWAYS


def check(
    exercise: Exercise,
    answer: Path,
    server: "RankServer",
    *,
    only: Sequence[str] | None = None,
    hang_s: float = HANG_S,
    stop: bool = False,
    measured: Mapping[str, list[int]] | None = None,
) -> Verdict:
    """Run the exercise's tests on the file `answer`. The same file gives the same verdict.

    server: started with PRELOAD, so that ranks are quick. only: these tests and no others. hang_s: ranks that
    do nothing new for so long hang. stop: at the first finding, whatever it is. measured: what the scenarios of a
    prediction did before; they are run when it is None.
    """
    answer = answer.resolve()
    if not answer.is_file():
        raise UserError(f"{answer} is not there: python -m exercises start copies the stubs")
    tests = [test for test in exercise.tests() if only is None or test.id in only]
    if exercise.kind == "predict" and measured is None:
        measured = measure(exercise.source, [test.id for test in tests], server)
    content = answer.read_bytes()
    with tempfile.TemporaryDirectory(prefix="minidist-answer-") as folder:
        copy = Path(folder).resolve() / answer.name  # the learner goes on writing in the other one
        copy.write_bytes(content)
        findings = _findings(exercise, tests, copy, content, _secret(exercise, answer), server, hang_s, stop, measured)
    return Verdict(exercise, content, _results(tests, findings))


def _findings(
    fault = (stubs.fault_line(exercise), exercise.fault) if exercise.fault else None
    offered = {"measured": measured, "fault": fault}
    findings: dict[str, Finding] = {}
    for size in sorted({size for test in tests for size in test.ranks}):
        wanted = [test.id for test in tests if size in test.ranks and test.id not in findings]
        while wanted:
            found = _run(exercise, wanted, answer, size, server, hang_s, offered)
            if found is None:
                break
            findings[found.test] = found
            wanted = wanted[wanted.index(found.test) + 1 :]
            if stop or found.kind in _ENOUGH:
                for test in _unfinished(tests, size, found.test):
                    findings.setdefault(test.id, Finding("skipped", _SKIPPED, test=test.id))
                return Verdict(exercise, answer, _results(tests, findings))
    return Verdict(exercise, answer, _results(tests, findings))


def _unfinished(tests: Sequence[TestCase], size: int, last: str) -> list[TestCase]:
    """The tests that have not run on all their numbers of ranks when the test `last` ends everything on `size`."""
    stop = next(place for place, test in enumerate(tests) if test.id == last)
    return [test for place, test in enumerate(tests) if (max(test.ranks), place) >= (size, stop)]


def _results(tests: Sequence[TestCase], findings: dict[str, Finding]) -> list[TestResult]:
    return [
        TestResult(test.id, test.says, 0 if test.id in findings else test.points, test.points, findings.get(test.id))
        for test in tests
    ]


def _run(
    exercise: Exercise,
    tests: Sequence[str],
    answer: Path,
    size: int,
    server: "RankServer",
    hang_s: float,
    offered: dict,
) -> Finding | None:
    """The first finding of these tests on fresh ranks, which names its test; None when all pass."""
    with tempfile.TemporaryDirectory(prefix="minidist-check-") as folder:
        finding = judge(_request(exercise, tests, answer, folder, offered), size, server, hang_s)
    if finding is not None and finding.test not in tests:
        finding.test = tests[0]
    return finding


def _request(exercise: Exercise, tests: Sequence[str], answer: Path, folder: str, offered: dict):
    from exercises.rankside import Request

    secret = (exercise.root / "solutions", exercise.root / "tests" / "answers", exercise.test_file, exercise.source)
    secret = tuple(str(path) for path in secret if not answer.is_relative_to(path))
    return Request(
        str(answer), str(exercise.test_file), tuple(tests), exercise.symbols, exercise.pieces, exercise.guards, secret,
        folder, MEMORY_BYTES, exercise.kind in _PROGRAMS, offered,
    )  # fmt: skip
