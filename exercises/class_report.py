"""The report about a graded class: points per exercise, what is hard, and which wrong answers are common.

A failed answer is compared with the catalogue's wrong answers of its exercise. Its code may be one of them, up to
comments and docstrings; otherwise those are named that fail the same test.
"""

import ast
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exercises.answers import read_answers
from exercises.catalogue import Exercise
from exercises.grade import Record, totals
from exercises.stubs import generate_answer
from exercises.submissions import Submission
from minidist.errors import UserError, format_count
from minidist.tools.output_files import write_atomically

_SHOWN = 3  # kinds of failure per exercise
_MAX_NOTE = 160
_NOT_BEGUN = ("unwritten", "missing", "syntax")  # findings that the catalogue's answers do not explain


@dataclass(frozen=True)
class Failure:
    """Answers to an exercise that fail in the same way.

    test: the test that they fail. says: its message. count: how many answers. notes: by note of a wrong answer of the
    catalogue, how many answers it may explain. is_exact: whether the answers' code is that of the catalogue; otherwise
    its answers fail the same test.
    """

    test: str
    says: str
    count: int
    notes: Mapping[str, int]
    is_exact: bool


@dataclass(frozen=True)
class ExerciseResult:
    """The results of a class in one exercise."""

    exercise: Exercise
    passed: int
    missing: int
    graded: int
    mean: float
    failures: Sequence[Failure]


def write_report(file: Path, submissions: Sequence[Submission], exercises: Sequence[Exercise], records) -> None:
    """Write the report, as HTML or Markdown by the file's name. Raises UserError for another name."""
    check_report_name(file)
    results = [summarize_exercise(exercise, records, submissions) for exercise in exercises]
    text = (_as_html if file.suffix == ".html" else _as_markdown)(results, totals(records))
    write_atomically(file, text.encode())


def check_report_name(file: Path) -> None:
    """Raise UserError unless the file's name is that of an HTML or Markdown file."""
    if file.suffix not in (".html", ".md"):
        raise UserError(f"a report is written as .html or .md; {file.name} is neither")


def summarize_exercise(
    exercise: Exercise, records: Sequence[Record], submissions: Sequence[Submission]
) -> ExerciseResult:
    """Summarize the records of one exercise."""
    mine = [record for record in records if record.exercise == exercise.name]
    failed = [record for record in mine if record.verdict == "failed"]
    contents = {submission.student: submission.answers.get(exercise.name, b"") for submission in submissions}
    return ExerciseResult(
        exercise,
        sum(record.verdict == "passed" for record in mine),
        sum(record.verdict in ("missing", "unreadable") for record in mine),
        len(mine),
        sum(record.points for record in mine) / len(mine) if mine else 0.0,
        _group_failures(exercise, failed, contents),
    )


def _group_failures(exercise: Exercise, failed: Sequence[Record], contents: Mapping[str, bytes]) -> list[Failure]:
    """Group the failed answers by test and message, most frequent first."""
    wrong = read_answers(exercise).wrong if failed else []
    code = {normalized_code(generate_answer(exercise, answer.name)): answer for answer in wrong}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in failed:
        groups.setdefault((record.test, record.message.partition("\n")[0]), []).append(record)
    found = []
    for (test, says), records in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        exact = Counter()
        for record in records:
            text = contents.get(record.student, b"").decode(errors="replace")
            if answer := code.get(normalized_code(text)):
                exact[answer.note] += 1
        begun = records[0].kind not in _NOT_BEGUN
        same_test = Counter(answer.note for answer in wrong if answer.caught_by == test and begun)
        found.append(Failure(test, says, len(records), exact or same_test, bool(exact)))
    return found


def normalized_code(text: str) -> str:
    """Return a program's code without comments, docstrings and layout; the text itself if it is not Python."""
    try:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _sort_by_points(results: Sequence[ExerciseResult]) -> list[ExerciseResult]:
    """Sort by the fraction of the points that the class has earned, lowest first."""
    return sorted(results, key=lambda result: result.mean / result.exercise.points)


def _format_row(result: ExerciseResult) -> list[str]:
    """Return the cells of an exercise's row in the table."""
    exercise = result.exercise
    return [
        exercise.section, exercise.name, f"{result.mean:.1f} of {exercise.points}",
        f"{100 * result.mean / exercise.points:.0f} %", f"{result.passed} of {result.graded}", str(result.missing),
    ]  # fmt: skip


_COLUMNS = ("section", "exercise", "mean points", "earned", "passed", "not handed in")


def _format_failures(result: ExerciseResult) -> list[str]:
    """Return lines about the most frequent failures of an exercise; notes are indented."""
    lines = []
    for failure in result.failures[:_SHOWN]:
        times = "1 answer" if failure.count == 1 else f"{failure.count} answers"
        lines.append(f"{times}, test {failure.test}: {failure.says}")
        known = "" if failure.is_exact else "perhaps: "
        for note, count in sorted(failure.notes.items(), key=lambda item: -item[1])[:_SHOWN]:
            shown = note if len(note) <= _MAX_NOTE else note[: _MAX_NOTE - 4] + " ..."
            lines.append(f"  {known}{shown}" + (f" ({count} times)" if failure.is_exact else ""))
    return lines


def _format_points(points: Mapping[str, tuple[int, int]]) -> str:
    """Return number of students, mean and median points as text. points: (earned, possible) by student."""
    earned = [got for got, _ in points.values()]
    most = max((of for _, of in points.values()), default=0)
    mean = sum(earned) / max(1, len(earned))
    middle = sorted(earned)[len(earned) // 2] if earned else 0
    return f"{format_count(len(points), 'student')}; {mean:.0f} of {most} points on average, median {middle}"


def _as_markdown(results: Sequence[ExerciseResult], points: Mapping[str, tuple[int, int]]) -> str:
    """Return the report as Markdown. points: (earned, possible) by student."""
    lines = ["# Class report", "", _format_points(points), "", "## Exercises, hardest first", ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    lines += [f"| {' | '.join(_format_row(result))} |" for result in _sort_by_points(results)]
    lines += ["", "## Common wrong answers", ""]
    for result in _sort_by_points(results):
        if result.failures:
            lines += [f"### {result.exercise.section} {result.exercise.name}", ""]
            for line in _format_failures(result):
                escaped = html.escape(line.strip(), quote=False).replace("|", "\\|").replace("*", "\\*")
                lines.append(("  * " if line.startswith(" ") else "* ") + escaped)
            lines.append("")
    lines += ["## Students", "", "| student | points |", "|---|---|"]
    lines += [f"| {html.escape(name)} | {got} of {of} |" for name, (got, of) in points.items()]
    return "\n".join(lines) + "\n"


def _as_html(results: Sequence[ExerciseResult], points: Mapping[str, tuple[int, int]]) -> str:
    """Return the report as an HTML page. points: (earned, possible) by student."""

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        cells = ["<tr>" + "".join(f"<th>{html.escape(text)}</th>" for text in head) + "</tr>"]
        cells += ["<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows]
        return "<table>\n" + "\n".join(cells) + "\n</table>"

    hardest, parts = _sort_by_points(results), []
    for result in hardest:
        if result.failures:
            parts.append(f"<h3>{html.escape(result.exercise.section)} {html.escape(result.exercise.name)}</h3>\n<ul>")
            for line in _format_failures(result):
                indent = ' style="margin-left: 2em"' if line.startswith(" ") else ""
                parts.append(f"<li{indent}>{html.escape(line.strip())}</li>")
            parts.append("</ul>")
    students = table(("student", "points"), [(name, f"{got} of {of}") for name, (got, of) in points.items()])
    style = "body{font-family:sans-serif;max-width:70em;margin:2em auto}td,th{padding:.2em .8em;text-align:left}"
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Class report</title><style>{style}</style>',
            f"<h1>Class report</h1>\n<p>{html.escape(_format_points(points))}</p>",
            "<h2>Exercises, hardest first</h2>",
            table(_COLUMNS, [_format_row(result) for result in hardest]),
            "<h2>Common wrong answers</h2>",
            *parts,
            f"<h2>Students</h2>\n{students}\n</html>\n",
        ]
    )
