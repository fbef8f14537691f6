"""The displays of an exercise and of a verdict in a notebook."""

import ast
import html
import itertools
import os
import re
from pathlib import Path

from exercises import report
from exercises.attempt import hints_left
from exercises.catalogue import Catalogue, Exercise
from exercises.check import Verdict
from exercises.work import Work

_LABEL = re.compile(r"(Example|Checked|You may call)\b[^:.]{0,80}:")  # begins a part of a statement
_GREEN, _RED = "#1a7f37", "#cf222e"  # readable on a light and on a dark background


class ExerciseDisplay:
    """The display of one exercise. work: the learner's folder; None if the notebook is in none."""

    def __init__(self, exercise: Exercise, work: Work | None):
        self._exercise, self._work = exercise, work

    def __repr__(self) -> str:
        return "\n".join(
            [
                self._format_title(),
                self._format_facts(),
                "",
                *self._task_lines(),
                "",
                f"Your file: {self._learner_file_name()}",
            ]
        )

    def _repr_markdown_(self) -> str:
        task = _as_markdown(self._task_lines())
        link = f"Your file: [{self._learner_file_name()}]({self._learner_file_link()})"
        return f"**{self._format_title()}**\n\n{self._format_facts()}\n\n{task}\n\n{link}"

    def _format_title(self) -> str:
        """Return section, title and name of the exercise."""
        return f"Exercise {self._exercise.section}: {self._exercise.title} ({self._exercise.name})"

    def _format_facts(self) -> str:
        """Return difficulty, minutes, points, hints left and whether it is passed, as text."""
        exercise, work = self._exercise, self._work
        left = hints_left(exercise, work) if work else len(exercise.hints)
        facts = ["optional"] * exercise.optional + [
            f"difficulty {exercise.difficulty} of 5",
            f"{exercise.minutes} minutes",
            f"{exercise.points} points",
        ]
        facts += [f"{left} of {len(exercise.hints)} hints left (%hint {exercise.name})"]
        return ", ".join([*facts, *["passed"] * bool(work and work.entry(exercise).get("passed"))])

    def _task_lines(self) -> list[str]:
        """The task: the stub's docstring between its title and how to check it."""
        lines = (ast.get_docstring(ast.parse(self._exercise.stub.read_text())) or "").splitlines()
        end = next((i for i, line in enumerate(lines) if line.startswith("Check it with")), len(lines))
        return "\n".join(lines[1:end]).strip().splitlines()

    def _learner_file_name(self) -> str:
        """Return the path of the learner's file below the course, as shown."""
        return f"work/exercises/{self._exercise.chapter}/{self._exercise.stub.name}"

    def _learner_file_link(self) -> str:
        """Return the path of the learner's file relative to the notebook's folder, as a JupyterLab link."""
        if self._work is None:
            return f"../../exercises/{self._exercise.chapter}/{self._exercise.stub.name}"
        return os.path.relpath(self._work.file(self._exercise), Path.cwd())


class VerdictDisplay:
    """The display of a verdict in a notebook: laid out and coloured, or the report of the shell as text."""

    def __init__(self, verdict: Verdict, hints_left: int):
        self._verdict, self._hints_left = verdict, hints_left

    def __repr__(self) -> str:
        return report.format_verdict(self._verdict, self._hints_left, in_notebook=True)

    def _repr_html_(self) -> str:
        verdict = self._verdict
        color = _GREEN if verdict.passed else _RED
        lines = [f'<div style="border-left: 6px solid {color}; padding-left: 12px">']
        lines += [f'<b style="color: {color}">{html.escape(report.format_title(verdict))}</b>']
        for result in verdict.results:
            mark, color = ("&#10007;", _RED) if result.finding else ("&#10003;", _GREEN)
            text = f"{html.escape(result.id)}: {html.escape(result.description)}"
            lines += [f'<div><span style="color: {color}">{mark}</span> {text}</div>']
        if verdict.reported:
            finding = "\n".join([f"{verdict.reported.id}:", *report.format_finding(verdict.reported.finding)])
            lines += [f'<pre style="margin: 8px 0">{html.escape(finding)}</pre>']
        if verdict.passed and verdict.exercise.solution.is_file():
            return "\n".join([*lines, SolutionDisplay(verdict.exercise)._repr_html_(), "</div>"])
        lines += [f"<div>{html.escape(line)}</div>" for line in report.next_steps(verdict, self._hints_left, True)]
        return "\n".join([*lines, "</div>"])


class SolutionDisplay:
    """The display of an exercise's solution in a notebook: folded unless `is_open`, or the file as text."""

    def __init__(self, exercise: Exercise, is_open: bool = False):
        self._exercise, self._is_open = exercise, is_open

    def __repr__(self) -> str:
        return self._exercise.solution.read_text()

    def _repr_html_(self) -> str:
        title, text = f"Solution of {self._exercise.name}", html.escape(repr(self))
        return f"<details{' open' * self._is_open}><summary>{title}</summary><pre>{text}</pre></details>"


def update_stored_displays(catalogue: Catalogue) -> list[Path]:
    """Store the current display in every `%exercise` cell of the chapters; return the notebooks that have changed."""
    import nbformat

    changed = []
    for file in sorted((catalogue.root / "chapters").glob("[0-9]*/*.ipynb")):
        before = file.read_text()
        notebook = nbformat.reads(before, as_version=4)
        for cell in (cell for cell in notebook.cells if cell.source.startswith("%exercise ")):
            display = ExerciseDisplay(catalogue[cell.source.split()[1]], None)
            data = {"text/markdown": display._repr_markdown_(), "text/plain": repr(display)}
            for output in (output for output in cell.outputs if "data" in output):
                output.data.update(data)
        after = nbformat.writes(notebook)
        if after.strip() != before.strip():
            file.write_text(after + "\n")
            changed.append(file)
    return changed


def _as_markdown(lines: list[str]) -> str:
    """Return a task's lines as markdown.

    Indented lines are prose, which goes on with the paragraph before, unless something says that they are code: a colon
    before them, columns, or a bracket at the beginning. No asterisk of `2**16` is bold type.
    """
    result: list[str] = []
    for is_indented, group in itertools.groupby(lines, key=lambda line: line.startswith("    ")):
        block = list(group)
        is_code = any("  " in line[4:] or line.strip().startswith(("{", "[")) for line in block)
        if is_indented and (is_code or result[-1].rstrip("*").endswith(":")):
            result += [*[""] * bool(result[-1]), *block]
            continue
        for line in block:
            label = match.group() if (match := _LABEL.match(line)) else ""
            parts = line.strip().removeprefix(label).split("`")  # the odd ones are code, where markdown keeps asterisks
            text = "`".join(part if i % 2 else part.replace("**", r"\*\*") for i, part in enumerate(parts))
            result += [""] * bool(label and result and result[-1]) + [f"**{label}**{text}" if label else text]
    return "\n".join(result)
