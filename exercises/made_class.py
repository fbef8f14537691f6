"""Makes submissions of a class that does not exist, from the right and wrong answers of the exercises.

With it an instructor tries `grade` and its report before term, and the project measures them.
"""

import random
import zipfile
from pathlib import Path

from exercises.answers import read_answers
from exercises.catalogue import Catalogue, Exercise
from exercises.stubs import generate_answer
from minidist.errors import UserError

_RIGHT, _MISSING = 0.6, 0.05  # of all answers; the others are wrong, or the untouched stub
_STUB = 0.05


def make_class(catalogue: Catalogue, folder: Path, students: int, seed: int = 0) -> list[Path]:
    """Write the submissions of `students` students, every third one as a zip file; return their paths.

    Each file is different, as the students' names are in it. Raises UserError if the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder for the made submissions")
    if students < 1:
        raise UserError(f"a class of {students} students cannot be made; give at least 1")
    chosen, made = random.Random(seed), []
    for number in range(1, students + 1):
        student = f"student-{number:03}"
        files = {}
        for exercise in catalogue.values():
            text = _choose_answer(exercise, chosen)
            if text is not None:
                name = f"work/exercises/{exercise.chapter}/{exercise.name}.py"
                files[name] = f"{text.rstrip()}\n\n# {student}\n"
        made.append(_write_zip(folder, student, files) if number % 3 == 0 else _write_folder(folder, student, files))
    return made


def _choose_answer(exercise: Exercise, chosen: random.Random) -> str | None:
    """Return the text of an answer; None if the student has not handed one in."""
    answers, part = read_answers(exercise), chosen.random()
    if part < _RIGHT:
        right = chosen.choice(["", *(answer.name for answer in answers.right)])
        return generate_answer(exercise, right) if right else exercise.solution.read_text()
    if part < _RIGHT + _MISSING:
        return None
    if part < _RIGHT + _MISSING + _STUB or not answers.wrong:
        return exercise.stub.read_text()
    return generate_answer(exercise, chosen.choice(answers.wrong).name)


def _write_folder(folder: Path, student: str, files: dict[str, str]) -> Path:
    """Write the files of a student, by name, to a folder; return the folder."""
    for name, text in files.items():
        file = folder / student / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / student


def _write_zip(folder: Path, student: str, files: dict[str, str]) -> Path:
    """Write the files of a student, by name, to a zip file; return the zip file."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{student}.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made
