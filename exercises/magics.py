"""Exercises in a notebook: `%load_ext minidist.tools.notebook`, which finds the course, then `%load_ext exercises`.

%exercise NAME             show the exercise; add a cell with your file in it
%%exercise NAME            write the cell to your file in work/ and grade it
%check NAME                grade your file; with --install, a passed piece replaces the package's in this notebook
%hint NAME                 show the next hint
%solution NAME             show the solution once you have passed; before that, with --anyway
%train NAME NAME ...       train a small model with your passed functions, and with the package's own beside it

The report is that of `python -m exercises check NAME`, the file and progress.json are the same.
"""

import json
import os
import re
import shlex
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.display import display

from exercises.attempt import grade_attempt, hints_left, reveal_hint
from exercises.catalogue import Catalogue, Exercise
from exercises.exercise_display import ExerciseDisplay, SolutionDisplay, VerdictDisplay
from exercises.train_in_notebook import train_in_notebook
from exercises.work import Work
from minidist.errors import RunError, UserError
from minidist.tools import progress
from minidist.tools.notebook.frontend import is_interactive
from minidist.tools.notebook.magics import RanksMagics

_NO_FOLDER = (
    "this notebook is not in your folder: python -m exercises start makes it, with a copy of the notebooks; "
    "make lab opens it"
)


@magics_class
class ExerciseMagics(Magics):
    """The magics of the exercises. ranks: the notebook's `%%ranks` magics, whose rank server grades."""

    def __init__(self, shell, ranks: RanksMagics, catalogue: Catalogue | None = None):
        super().__init__(shell)
        self._ranks, self._catalogue = ranks, catalogue or Catalogue()
        self._offered: set[str] = set()

    @line_cell_magic
    def exercise(self, line: str, cell: str | None = None):
        """Show an exercise (`%exercise NAME`), or write your answer and check it (`%%exercise NAME`)."""
        exercise = self._find_exercise(line, "%exercise")
        if cell is None:
            work = _learner_folder(needed=False)
            display(ExerciseDisplay(exercise, work))
            if work is not None and is_interactive(self.shell) and not self._has_cell(exercise):
                self._add_answer_cell(exercise, work)
            return
        if not cell.strip():
            raise UsageError(f"the cell is empty; %exercise {exercise.name} adds one with your file in it")
        work = _learner_folder()
        # An empty line replaces the magic, so that line numbers are those of the cell.
        text = cell if cell.strip() == exercise.stub.read_text().strip() else "\n" + cell
        backup = work.write_from_cell(exercise, text)
        if backup:
            print(f"your file was changed outside this cell; that version is kept as {backup.name}")
        self._grade(exercise, work)

    @line_magic
    def check(self, line: str):
        """Check your file: `%check NAME`, or `%check NAME --install` to use a passed piece in this notebook."""
        exercise = self._find_exercise(line, "%check", "--install")
        install = "--install" in line.split()
        if install and exercise.kind != "piece":
            raise UsageError(f"{exercise.name} is not a piece of the package, so there is nothing to install")
        work = _learner_folder(needed=False)
        if work is None:  # as in the notebooks of the repository, which run from top to bottom
            print(f"{exercise.name}: not graded: {_NO_FOLDER}")
            return
        passed = self._grade(exercise, work)
        if install and passed:
            text = work.file(exercise).read_text()
            for piece in (*exercise.also, exercise.piece):
                self._ranks.replace_symbol(piece, text, exercise.symbols)

    @line_magic
    def hint(self, line: str):
        """Show the next hint and all earlier ones: `%hint NAME`."""
        print(reveal_hint(self._find_exercise(line, "%hint"), _learner_folder()))

    @line_magic
    def solution(self, line: str):
        """Show the solution: `%solution NAME`, or `%solution NAME --anyway` before you have passed."""
        exercise, work = self._find_exercise(line, "%solution", "--anyway"), _learner_folder(needed=False)
        if not exercise.solution.is_file():
            raise UsageError("this student's copy of the course lacks the solutions")
        if "--anyway" not in line.split() and not (work and work.entry(exercise).get("passed")):
            raise UsageError(
                f"you have not passed {exercise.name} yet; to see its solution all the same, write "
                f"%solution {exercise.name} --anyway"
            )
        display(SolutionDisplay(exercise, is_open=True))

    @line_magic
    def train(self, line: str):
        """Train with your passed functions of these exercises, and with the package's beside it: `%train NAME ...`."""
        names = shlex.split(line)
        if not names:
            raise UsageError("write %train and the names of the exercises whose functions are to train the model")
        work = _learner_folder(needed=False)
        _as_usage_error(lambda: train_in_notebook(self._catalogue, work, names, self._ranks.server))

    def _find_exercise(self, line: str, magic: str, *flags: str) -> Exercise:
        """Return the exercise named in a magic's line. Raises UsageError. flags: options that the line may have."""
        words = [word for word in shlex.split(line) if word not in flags]
        if len(words) != 1:
            names = ", ".join(self._catalogue)
            raise UsageError(f"write {magic} and the name of an exercise: {names}")
        return _as_usage_error(lambda: self._catalogue[words[0]])

    def _grade(self, exercise: Exercise, work: Work) -> bool:
        """Grade the learner's file and show the verdict; return whether it passed."""
        verdict = _as_usage_error(lambda: grade_attempt(exercise, work, self._ranks.server)).verdict
        display(VerdictDisplay(verdict, hints_left(exercise, work)))
        return verdict.passed

    def _add_answer_cell(self, exercise: Exercise, work: Work) -> None:
        """Add a cell with the learner's file below the current cell."""
        text = work.open_in_cell(exercise).removeprefix("\n").rstrip("\n")
        self._offered.add(exercise.name)
        self.shell.set_next_input(f"%%exercise {exercise.name}\n{text}", replace=False)

    def _has_cell(self, exercise: Exercise) -> bool:
        """Return whether the notebook has this exercise's cell: added in this session, or in the saved file."""
        if exercise.name in self._offered:
            return True
        try:
            notebook = json.loads(Path(os.environ.get("JPY_SESSION_NAME", "")).read_text())
            sources = ["".join(cell["source"]) for cell in notebook["cells"]]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return any(re.match(rf"%%exercise +{exercise.name}\s", source) for source in sources)


def _learner_folder(needed: bool = True) -> Work | None:
    """Return the learner's folder that contains this notebook; None if there is none and it is not `needed`."""
    file = progress.find_progress_file(Path.cwd())
    if file is None and needed:
        raise UsageError(_NO_FOLDER)
    return Work(file.parent) if file else None


def _as_usage_error(call):
    """Return the call's result; turn its user and run errors into one line in the notebook."""
    try:
        return call()
    except (UserError, RunError) as error:
        raise UsageError(str(error)) from None
