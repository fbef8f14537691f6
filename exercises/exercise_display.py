"""The display of an exercise in a notebook: its task, its points, the learner's file."""

import ast
import os
from pathlib import Path

from exercises.attempt import hints_left
from exercises.catalogue import Catalogue, Exercise
from exercises.work import Work


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
    """Return the lines of a task with a blank line before indented ones, which markdown would join to the paragraph."""
    result = []
    for line in lines:
        if line.startswith("    ") and result and result[-1] and not result[-1].startswith("    "):
            result.append("")
        result.append(line)
    return "\n".join(result)
