"""Judge a learner's file: every test in fresh ranks, and every way to fail as one short finding."""

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.catalogue import Exercise, TestCase
from exercises.measure import measure
from exercises.testing import Finding
from minidist.errors import RunError, UserError

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
_OUTPUT_BYTES = 1 << 20
_LOOK_S = 0.05
# After these the other tests would end alike.
_ENOUGH = ("syntax", "missing", "hang", "printing", "memory", "exit")
_LONGEST_S = 60.0
_PRINTS = "your code prints without end"
_SKIPPED = "not run, because of how another test ended"
# How the ranks of a check end by themselves, which is no learner's concern.
_OURS = re.compile(r"\nranks? [\d, -]+ (died: .*|raised Found: .*(\n  at .*)?)")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>\S+)')


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
    """How a file was judged."""

    exercise: Exercise
    answer: Path
    results: Sequence[TestResult]

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.finding is None for result in self.results)

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
        finding = _judge(_request(exercise, tests, answer, folder, offered), size, server, hang_s)
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


def _judge(request, size: int, server: "RankServer", hang_s: float) -> Finding | None:
    from exercises.rankside import PASSED, run_tests
    from minidist.train.launch import RankFailure

    job = server.start(run_tests, size, (request,), backend=None, threads=1, deadline_s=_LONGEST_S, tidy=False)
    stopped = None
    try:
        stopped = _watch(job, request, size, hang_s)
        values = job.wait().values
    except RankFailure as failure:
        found = stopped or _found(request, size, failure.output)
        # That a peer is gone says less than how it went.
        told = found is not None and (found.kind != "network" or failure.kind == "raised")
        return found if told else _failed(failure, request, size)
    except (RunError, UserError) as error:
        return _found(request, size) or Finding("raised", str(error), size=size)
    except BaseException:
        job.kill()
        raise
    return None if values == [PASSED] * size else Finding("exit", "your code ended the test before its end", size=size)


def _watch(job, request, size: int, hang_s: float) -> Finding | None:
    """Wait for the end of the job; ends it, and says why, when it prints without end or nothing changes any more."""
    seen, since_s = None, time.monotonic()
    while not job.poll(_LOOK_S):
        talks = next((rank for rank in range(size) if len(job.output(rank)) > _OUTPUT_BYTES), None)
        now = ([_note(request, rank) for rank in range(size)], job.boards())
        if now != seen or not any(test for test, _ in now[0]):
            seen, since_s = now, time.monotonic()
        if talks is None and time.monotonic() - since_s < hang_s:
            continue
        stacks = {rank: stack for rank, stack in job.stacks().items() if _frame(stack, request)}
        job.kill()
        if talks is not None:
            return _placed(Finding("printing", _PRINTS, rank=talks, size=size), stacks.get(talks, ""), request)
        return _hung(now[1], stacks, request)
    return None


def _hung(boards: Sequence, stacks: dict[int, str], request) -> Finding:
    """Nothing changes any more: the rank that is busy is to blame, those that wait for it are not."""
    from minidist.comm.standing import describe

    busy = [rank for rank in stacks if boards[rank] is not None and boards[rank].state != "waiting"]
    rank = min(busy or stacks, default=0)
    lines = describe(dict(enumerate(boards))) if len(boards) > 1 else []
    what = "\n".join(["your code does not come to an end", *lines])
    return _placed(Finding("hang", what, rank=rank, size=len(boards)), stacks.get(rank, ""), request)


def _found(request, size: int, output: Sequence[str] = ()) -> Finding | None:
    """What the ranks left: of the lowest rank that has more to say than that a peer was gone."""
    files = [Path(request.folder, f"finding-{rank}") for rank in range(size)]
    findings = [Finding(**json.loads(file.read_text())) for file in files if file.exists()]
    found = min(findings, key=lambda finding: finding.kind == "network", default=None)
    if found is not None and found.rank < len(output):
        found.printed = next((line[:100] for line in reversed(output[found.rank].splitlines()) if line.strip()), "")
    return found


def _failed(failure, request, size: int) -> Finding:
    """What a job says that ended without a finding."""
    rank = failure.ranks[0] if failure.ranks else 0
    if failure.kind in ("deadlock", "mismatch"):
        return _placed(Finding("deadlock", _OURS.sub("", str(failure)), rank=rank, size=size), "", request)
    output = failure.output[rank] if rank < len(failure.output) else ""
    if "bad_alloc" in output:
        return _placed(
            Finding("memory", "your code asks for more memory than a check may use", rank=rank, size=size),
            output,
            request,
        )
    told = next((line for line in str(failure).splitlines() if " died" in line), str(failure).splitlines()[0])
    how = told.partition("died")[2].lstrip(": ") or told
    return _placed(Finding("died", f"your code ended its process: {how}", rank=rank, size=size), output, request)


def _placed(finding: Finding, stack: str, request) -> Finding:
    """The finding with the learner's line that a stack shows, and the call that was under way."""
    frame = _frame(stack, request)
    if frame:
        finding.line = int(frame["line"])
        lines = Path(request.answer).read_text(errors="replace").splitlines()
        finding.source = lines[finding.line - 1].strip()[:100] if finding.line <= len(lines) else ""
    finding.test, finding.call = _note(request, finding.rank)
    return finding


def _frame(stack: str, request) -> re.Match | None:
    return next((m for m in _FRAME.finditer(stack) if m["file"] == request.answer), None)


def _note(request, rank: int) -> tuple[str, str]:
    """The test and the call that were under way on a rank."""
    file = Path(request.folder, f"note-{rank}")
    test, _, call = (file.read_text(errors="replace") if file.exists() else "").partition("\n")
    return test, call.strip()
