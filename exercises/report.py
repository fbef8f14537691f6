"""Reports of a verdict: text of fewer than fifteen lines, and JSON."""

from typing import Any

from exercises import stubs
from exercises.check import TestResult, Verdict
from exercises.testing import Finding

MAX_LINES = 14


def format_finding(finding: Finding, max_lines: int = MAX_LINES) -> list[str]:
    """Format one finding in at most `max_lines` lines: the fault, the call that shows it, rank, expected, got, line."""
    facts = {
        "for": finding.call,
        "rank": f"{finding.rank} of {finding.size}" if finding.size > 1 and finding.kind != "deadlock" else "",
        "expected": finding.expected,
        "got": finding.got,
        "line": f"{finding.line}: {finding.source}" if finding.line else "",
        "printed": finding.printed,
    }
    lines = [f"  {name:<8}  {value}" for name, value in facts.items() if value]
    what, room = finding.what.splitlines(), max_lines - len(lines)
    return (what if len(what) <= room else [*what[: room - 1], "..."]) + lines


def format_verdict(verdict: Verdict, hints_left: int = 0, in_notebook: bool = False) -> str:
    """Return the report: passed and failed tests, one failure in full, what to do next.

    in_notebook: name the notebook's magics, and not the commands of the shell.
    """
    title = format_title(verdict)
    if verdict.passed:
        return "\n".join([title, *next_steps(verdict, hints_left, in_notebook)])
    failed, reported = [result for result in verdict.results if result.finding], verdict.reported
    passed = [result.id for result in verdict.results if not result.finding]
    lines = [title]
    lines += [f"passed: {', '.join(passed)}"] if passed else []
    lines += [f"failed: {', '.join(result.id for result in failed)}"]
    lines += ["", f"{reported.id}: {reported.description}"]
    after = next_steps(verdict, hints_left, in_notebook)
    return "\n".join([*lines, *format_finding(reported.finding, MAX_LINES - len(lines) - len(after)), *after])


def format_title(verdict: Verdict) -> str:
    """Return the first line of the report: the exercise, whether it is passed, the points."""
    name, of = verdict.exercise.name, verdict.exercise.points
    return f"{name}: passed, {of} of {of} points" if verdict.passed else f"{name}: {verdict.points} of {of} points"


def next_steps(verdict: Verdict, hints_left: int = 0, in_notebook: bool = False) -> list[str]:
    """Return what the learner may do after this verdict, a line each."""
    name = verdict.exercise.name
    shell = "!python -m exercises" if in_notebook else "python -m exercises"
    if verdict.passed:
        command = f"%solution {name}" if in_notebook else f"{shell} solution {name}"
        return [f"{command} shows the package's own code"] if verdict.exercise.solution.is_file() else []
    lines = []
    if _is_stub_outdated(verdict):
        lines += [f"Your file started from an older stub: {shell} reset {name} backs it up and renews it."]
    if hints_left:
        hint = f"%hint {name}" if in_notebook else f"{shell} hint {name}"
        lines += [f"Next hint: {hint} ({hints_left} left)"]
    return lines


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
    """Return the JSON object of one test: points and message."""
    message = "\n".join(format_finding(result.finding)) if result.finding else ""
    kind = result.finding.kind if result.finding else ""
    return {"id": result.id, "points": result.points, "of": result.max_points, "kind": kind, "message": message}


def _is_stub_outdated(verdict: Verdict) -> bool:
    """Return whether the graded file started from an earlier version of the stub."""
    began = stubs.stub_version(verdict.content.decode(errors="replace"))
    return began is not None and began != stubs.stub_version(verdict.exercise.stub.read_text())
