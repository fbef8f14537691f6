"""Runs the tests of a check on fresh ranks and diagnoses the outcome: a failed test, a hang, a deadlock or a death."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exercises.testing import Finding
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from exercises.rank_tests import Request
    from minidist.tools.launch import RankServer

_OUTPUT_BYTES = 1 << 20
_POLL_S = 0.05
_MEMORY_STEP_BYTES = 64 << 20  # growth in memory that counts as progress
_DEADLINE_S = 60.0
_ENDLESS_OUTPUT = "your code prints endlessly"
# Lines on how the ranks of a check end, which learners need not see.
_JOB_END_LINES = re.compile(r"\nranks? [\d, -]+ (died: .*|raised FindingStored: .*(\n  at .*)?)")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>\S+)')


def run_and_diagnose(request: "Request", size: int, server: "RankServer", hang_s: float) -> Finding | None:
    """Run the tests on `size` fresh ranks; return the first finding, None if all tests pass.

    hang_s: ranks that make no progress for this long are reported as hanging.
    """
    from exercises.rank_tests import PASSED, run_tests
    from minidist.tools.launch import RankFailure

    job = server.start(run_tests, size, (request,), backend=None, threads=1, deadline_s=_DEADLINE_S, clean_exit=False)
    stopped = None
    try:
        stopped = _watch(job, request, size, hang_s)
        values = job.wait().values
    except RankFailure as failure:
        found = stopped or _stored_finding(request, size, failure.output)
        # How a rank failed says more than that its peers lost it.
        told = found is not None and (found.kind != "network" or failure.kind == "raised")
        return found if told else _failure_finding(failure, request, size)
    except (RunError, UserError) as error:
        return _stored_finding(request, size) or Finding("raised", str(error), size=size)
    except BaseException:
        job.kill()
        raise
    return None if values == [PASSED] * size else Finding("exit", "your code ended the test early", size=size)


def _watch(job, request, size: int, hang_s: float) -> Finding | None:
    """Wait for the end of the job; end it, with a finding, if it prints without end or makes no more progress."""
    seen, since_s = None, time.monotonic()
    while not job.poll(_POLL_S):
        talks = next((rank for rank in range(size) if len(job.output(rank)) > _OUTPUT_BYTES), None)
        notes = [_running_call(request, rank) for rank in range(size)]
        now = (notes, job.status_snapshots(), [_peak_bytes(pid) // _MEMORY_STEP_BYTES for pid in job.pids])
        if now != seen or not any(test for test, _ in notes):
            seen, since_s = now, time.monotonic()
        if talks is None and time.monotonic() - since_s < hang_s:
            continue
        stacks = {rank: stack for rank, stack in job.dump_stacks().items() if _frame(stack, request)}
        job.kill()
        if talks is not None:
            return _locate(Finding("printing", _ENDLESS_OUTPUT, rank=talks, size=size), stacks.get(talks, ""), request)
        return _hang_finding(now[1], stacks, request)
    return None


def _hang_finding(statuses: Sequence, stacks: dict[int, str], request) -> Finding:
    """Report a hang: blame a busy rank, not the ranks that wait for it."""
    from minidist.tools.deadlock.status_report import describe_ranks

    busy = [rank for rank in stacks if statuses[rank] is not None and statuses[rank].state != "waiting"]
    rank = min(busy or stacks, default=0)
    lines = describe_ranks(dict(enumerate(statuses))) if len(statuses) > 1 else []
    what = "\n".join(["your code does not finish", *lines])
    return _locate(Finding("hang", what, rank=rank, size=len(statuses)), stacks.get(rank, ""), request)


def _stored_finding(request, size: int, output: Sequence[str] = ()) -> Finding | None:
    """Return the finding of the lowest rank, preferring any other kind to "network"; None if no rank stored one."""
    files = [Path(request.folder, f"finding-{rank}") for rank in range(size)]
    findings = [Finding(**json.loads(file.read_text())) for file in files if file.exists()]
    found = min(findings, key=lambda finding: finding.kind == "network", default=None)
    if found is not None and found.rank < len(output):
        found.printed = next((line[:100] for line in reversed(output[found.rank].splitlines()) if line.strip()), "")
    return found


def _failure_finding(failure, request, size: int) -> Finding:
    """Derive a finding from the failure of a job whose ranks stored none."""
    rank = failure.ranks[0] if failure.ranks else 0
    if failure.kind in ("deadlock", "mismatch"):
        return _locate(Finding("deadlock", _JOB_END_LINES.sub("", str(failure)), rank=rank, size=size), "", request)
    output = failure.output[rank] if rank < len(failure.output) else ""
    if "bad_alloc" in output:
        return _locate(
            Finding("memory", "your code needs more memory than a check allows", rank=rank, size=size),
            output,
            request,
        )
    told = next((line for line in str(failure).splitlines() if " died" in line), str(failure).splitlines()[0])
    how = told.partition("died")[2].lstrip(": ") or told
    return _locate(Finding("died", f"your code ended its process: {how}", rank=rank, size=size), output, request)


def _locate(finding: Finding, stack: str, request) -> Finding:
    """Add to the finding the learner's line from a stack, and the running test and call."""
    frame = _frame(stack, request)
    if frame:
        finding.line = int(frame["line"])
        lines = Path(request.answer).read_text(errors="replace").splitlines()
        finding.source = lines[finding.line - 1].strip()[:100] if finding.line <= len(lines) else ""
    finding.test, finding.call = _running_call(request, finding.rank)
    return finding


def _frame(stack: str, request) -> re.Match | None:
    return next((m for m in _FRAME.finditer(stack) if m["file"] == request.answer), None)


def _running_call(request, rank: int) -> tuple[str, str]:
    """Return the test and the call that were running on a rank."""
    file = Path(request.folder, f"note-{rank}")
    test, _, call = (file.read_text(errors="replace") if file.exists() else "").partition("\n")
    return test, call.strip()


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
