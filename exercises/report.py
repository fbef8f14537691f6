"""Reports of a verdict: text of fewer than fifteen lines, and JSON."""

from typing import Any

from exercises import stubs
from exercises.check import TestResult, Verdict
from exercises.testing import Finding

MAX_LINES = 14


def message(finding: Finding, most: int = MAX_LINES) -> list[str]:
    """Format one finding in at most `most` lines: the fault, the call that shows it, rank, expected, got, line."""
    facts = {
        "for": finding.call,
        "rank": f"{finding.rank} of {finding.size}" if finding.size > 1 and finding.kind != "deadlock" else "",
        "expected": finding.expected,
        "got": finding.got,
        "line": f"{finding.line}: {finding.source}" if finding.line else "",
        "printed": finding.printed,
    }
    lines = [f"  {name:<8}  {value}" for name, value in facts.items() if value]
    what, room = finding.what.splitlines(), most - len(lines)
    return (what if len(what) <= room else [*what[: room - 1], "..."]) + lines


def text(verdict: Verdict, hints_left: int = 0) -> str:
    """Return the report for the shell: passed and failed tests, and one failure in full."""
    name, of = verdict.exercise.name, verdict.exercise.points
    if verdict.passed:
        return f"{name}: passed, {of} of {of} points\npython -m exercises solution {name} shows the package's own"
    failed, shown = [result for result in verdict.results if result.finding], verdict.shown
    passed = [result.id for result in verdict.results if not result.finding]
    lines = [f"{name}: {verdict.points} of {of} points"]
    lines += [f"passed: {', '.join(passed)}"] if passed else []
    lines += [f"failed: {', '.join(result.id for result in failed)}"]
    lines += ["", f"{shown.id}: {shown.says}"]
    after = []
    if _outdated(verdict):
        after += [f"Your file began as an older stub: python -m exercises reset {name} keeps it and gives the new one."]
    if hints_left:
        after += [f"Next hint: python -m exercises hint {name} ({hints_left} left)"]
    return "\n".join([*lines, *message(shown.finding, MAX_LINES - len(lines) - len(after)), *after])


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as JSON; equal files give equal text."""
    return {
        "exercise": verdict.exercise.name,
        "kind": verdict.exercise.kind,
        "passed": verdict.passed,
        "points": verdict.points,
        "of": verdict.exercise.points,
        "tests": [_test_json(result) for result in verdict.results],
    }


def _test_json(result: TestResult) -> dict[str, Any]:
    told = "\n".join(message(result.finding)) if result.finding else ""
    kind = result.finding.kind if result.finding else ""
    return {"id": result.id, "points": result.points, "of": result.of, "kind": kind, "message": told}


def _outdated(verdict: Verdict) -> bool:
    began = stubs.version(verdict.content.decode(errors="replace"))
    return began is not None and began != stubs.version(stubs.stub(verdict.exercise))
