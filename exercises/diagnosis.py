"""Runs the tests of a check on fresh ranks and diagnoses the outcome: a failed test, a hang, a deadlock or a death."""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exercises.scratch import Scratch
from exercises.testing import Finding
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from exercises.rank_tests import Request
    from minidist.tools.launch import RankServer

_CALL_OUTPUT_BYTES = 1 << 20  # in one call of a test; a debugging line may be printed in each of many
_OUTPUT_BYTES = 1 << 26
_POLL_S = 0.05
_MEMORY_STEP_BYTES = 64 << 20  # growth in memory that counts as progress
_ASLEEP = 4  # a rank that uses no processor time, as in time.sleep, may be silent for so many times longer
_PROC = Path("/proc/self/stat")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DEADLINE_S = 60.0
_ENDLESS_OUTPUT = "your code prints endlessly"
# Lines on how the ranks of a check end, which learners need not see.
_JOB_END_LINES = re.compile(r"\nranks? [\d, -]+ (died: .*|raised FindingStored: .*(\n  at .*)?)")
_LIBRARY_WARNING = re.compile(r"\[[WE]\d{4} |.*(User|Future|Runtime)Warning: ")  # torch's, not the learner's
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class Run:
    """One run of tests: the request, the folder that the ranks write to, and the content of the learner's file."""

    request: "Request"
    scratch: Scratch
    answer: bytes


def run_and_diagnose(run: Run, size: int, server: "RankServer", hang_s: float) -> Finding | None:
    """Run the tests on `size` fresh ranks; return the first finding, None if all tests pass.

    hang_s: ranks that compute for this long without progress are reported as hanging. Processor time is counted, and
    the time in which a rank waits for a processor is not, so that a busy machine does not change the verdict.
    """
    from exercises.rank_tests import run_tests
    from minidist.tools.launch import RankFailure

    options = {"backend": None, "threads": 1, "deadline_s": _DEADLINE_S, "clean_exit": False}
    job = server.start(run_tests, size, (run.request,), **options)
    stopped = None
    try:
        stopped = _watch_job(job, run, size, hang_s)
        values = job.wait().values
    except RankFailure as failure:
        found = stopped or _read_stored_finding(run, size, failure.output)
        # How a rank failed says more than that its peers lost it.
        told = found is not None and (found.kind != "network" or failure.kind == "raised")
        return found if told else _failure_finding(failure, run, size)
    except (RunError, UserError) as error:
        return _read_stored_finding(run, size) or Finding("raised", str(error), size=size)
    except BaseException:
        job.kill()
        raise
    return (
        None if values == [run.request.token] * size else Finding("exit", "your code ended the test early", size=size)
    )


def _watch_job(job, run: Run, size: int, hang_s: float) -> Finding | None:
    """Wait for the end of the job; end it, with a finding, if it prints without end or makes no more progress."""
    seen, since_s, used_s, queued_before_s = None, time.monotonic(), [0.0] * size, [0.0] * size
    calls, printed_before = {}, {}  # by rank: the running call, and the length of the output before it
    while not job.poll(_POLL_S):
        printed = [len(job.output(rank)) for rank in range(size)]
        notes = [_read_running_call(run, rank) for rank in range(size)]
        for rank, note in enumerate(notes):
            if calls.get(rank) != note:
                calls[rank], printed_before[rank] = note, printed[rank]
        endless = [n - printed_before[rank] > _CALL_OUTPUT_BYTES or n > _OUTPUT_BYTES for rank, n in enumerate(printed)]
        talks = endless.index(True) if any(endless) else None
        grown = [_read_peak_bytes(pid) // _MEMORY_STEP_BYTES for pid in job.pids]
        now, processor_s = (notes, job.status_snapshots(), printed, grown), list(map(_read_processor_s, job.pids))
        queued_s = list(map(_read_queued_s, job.pids))
        if now != seen or not any(test for test, _ in notes):
            seen, since_s, used_s, queued_before_s = now, time.monotonic(), processor_s, queued_s
        busy_s = max(after - before for before, after in zip(used_s, processor_s, strict=True))
        starved_s = max(after - before for before, after in zip(queued_before_s, queued_s, strict=True))
        if talks is None and busy_s < hang_s and time.monotonic() - since_s - starved_s < _ASLEEP * hang_s:
            continue
        stacks = {rank: stack for rank, stack in job.dump_stacks().items() if _find_answer_frame(stack, run)}
        job.kill()
        if talks is not None:
            return _add_location(
                Finding("printing", _ENDLESS_OUTPUT, rank=talks, size=size), stacks.get(talks, ""), run
            )
        return _hang_finding(now[1], stacks, run)
    return None


def _hang_finding(statuses: Sequence, stacks: dict[int, str], run: Run) -> Finding:
    """Report a hang: blame a busy rank, not the ranks that wait for it."""
    from minidist.tools.deadlock.status_report import describe_ranks

    busy = [rank for rank in stacks if statuses[rank] is not None and statuses[rank].state != "waiting"]
    rank = min(busy or stacks, default=0)
    lines = describe_ranks(dict(enumerate(statuses))) if len(statuses) > 1 else []
    what = "\n".join(["your code does not finish", *lines])
    return _add_location(Finding("hang", what, rank=rank, size=len(statuses)), stacks.get(rank, ""), run)


def _read_stored_finding(run: Run, size: int, output: Sequence[str] = ()) -> Finding | None:
    """Return the finding of the lowest rank, preferring any other kind to "network"; None if no rank stored one."""
    texts = [run.scratch.read(f"finding-{rank}") for rank in range(size)]
    findings = [_parse_finding(text, rank, size) for rank, text in enumerate(texts) if text is not None]
    found = min(findings, key=lambda finding: finding.kind == "network", default=None)
    if found is not None and found.rank < len(output):
        lines = [line for line in output[found.rank].splitlines() if line.strip() and not _LIBRARY_WARNING.match(line)]
        found.printed = lines[-1][:100] if lines else ""
    return found


def _parse_finding(text: str, rank: int, size: int) -> Finding:
    """Return the finding in the file of a rank. An answer may have written something else there."""
    try:
        finding = Finding(**json.loads(text))
        valid = all(isinstance(value, str) for value in (finding.kind, finding.what, finding.test))
    except (ValueError, TypeError, RecursionError):
        valid = False
    what = "your code changed how a test reports what it found"
    return finding if valid else Finding("forbidden", what, rank=rank, size=size)


def _failure_finding(failure, run: Run, size: int) -> Finding:
    """Derive a finding from the failure of a job whose ranks stored none."""
    rank = failure.ranks[0] if failure.ranks else 0
    if failure.kind in ("deadlock", "mismatch"):
        return _add_location(Finding("deadlock", _JOB_END_LINES.sub("", str(failure)), rank=rank, size=size), "", run)
    output = failure.output[rank] if rank < len(failure.output) else ""
    if "bad_alloc" in output:
        return _add_location(
            Finding("memory", "your code needs more memory than a check allows", rank=rank, size=size),
            output,
            run,
        )
    told = next((line for line in str(failure).splitlines() if " died" in line), str(failure).splitlines()[0])
    if failure.kind == "deadline":
        what = f"your code is too slow: the tests were not done after {_DEADLINE_S:g} s"
        return _add_location(Finding("slow", what, rank=rank, size=size), failure.stacks.get(rank, ""), run)
    how = told.partition("died")[2].lstrip(": ") or told
    return _add_location(Finding("died", f"your code ended its process: {how}", rank=rank, size=size), output, run)


def _add_location(finding: Finding, stack: str, run: Run) -> Finding:
    """Add to the finding the learner's line from a stack, and the running test and call."""
    frame = _find_answer_frame(stack, run)
    if frame:
        finding.line = int(frame["line"])
        lines = run.answer.decode(errors="replace").splitlines()
        finding.source = lines[finding.line - 1].strip()[:100] if finding.line <= len(lines) else ""
    finding.test, finding.call = _read_running_call(run, finding.rank)
    return finding


def _find_answer_frame(stack: str, run: Run) -> re.Match | None:
    """Return the innermost frame of a stack that is in the learner's file; None if there is none."""
    return next((m for m in _FRAME.finditer(stack) if m["file"] == run.request.answer), None)


def _read_running_call(run: Run, rank: int) -> tuple[str, str]:
    """Return the test and the call that were running on a rank."""
    test, _, call = (run.scratch.read(f"note-{rank}") or "").partition("\n")
    return test, call.strip()


def _read_peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _read_processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds.

    0 after its end; the time of a clock where the system does not report it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0 if _PROC.exists() else time.monotonic()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # in user and in kernel mode


def _read_queued_s(pid: int) -> float:
    """Return how long a process's main thread was ready to run but had no processor, in seconds; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
