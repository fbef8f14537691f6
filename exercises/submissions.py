"""Reads the submissions of a class.

A folder has one entry per student, named after the student: a folder, or a zip file. In it the answers are found by
their names, `NAME.py` for the exercise NAME, wherever they are: a whole `work/` tree, its `exercises/` folder, or the
bare files. If an answer is there several times, the copy in a folder of its chapter counts, then the one higher up.

Nothing of a submission is executed or unpacked. A file that is a link, or too large, or there twice with different
contents, is a problem of that one answer.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from exercises.catalogue import Catalogue
from minidist.errors import UserError

MAX_BYTES = 1 << 18  # of one answer
_MAX_FILES = 20_000  # of one submission
_IGNORED = {"__MACOSX", "__pycache__", ".ipynb_checkpoints", ".git", ".venv", "node_modules"}


@dataclass(frozen=True)
class Submission:
    """What one student has handed in. answers: the contents by exercise. problems: why others cannot be graded."""

    student: str
    answers: Mapping[str, bytes] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


def digest(content: bytes) -> str:
    """Return the hash by which records name the content of a file."""
    return hashlib.sha256(content).hexdigest()


def read_submissions(folder: Path, catalogue: Catalogue) -> list[Submission]:
    """Read all submissions in a folder, in alphabetical order. Raises UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that has a folder or a zip file per student")
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__")))
    entries = [entry for entry in entries if not entry.is_symlink()]
    found = [entry for entry in entries if entry.is_dir() or entry.suffix.lower() == ".zip"]
    if any((folder / name).is_dir() for name in ("exercises", "work")) or (not found and list(folder.glob("*.py"))):
        raise UserError(f"{folder} is the work of one student; give the folder above it, {folder.resolve().parent}")
    if not found:
        raise UserError(f"{folder} has no submission: a folder or a zip file per student, named after the student")
    names = [entry.stem if entry.is_file() else entry.name for entry in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{folder} has both a folder and a zip file of {', '.join(sorted(twice))}; remove one of them")
    return [read_submission(entry, name, catalogue) for entry, name in zip(found, names, strict=True)]


def read_submission(entry: Path, student: str, catalogue: Catalogue) -> Submission:
    """Read the submission of one student, a folder or a zip file. Never raises: it says what is wrong with it."""
    names = set(catalogue)
    copies: dict[str, list[tuple[tuple, bytes | str]]] = {}
    try:
        for path, content in _read_zip(entry) if entry.is_file() else _read_folder(entry):
            if path.suffix == ".py" and path.stem in names and not _IGNORED & set(path.parts):
                in_chapter = path.parent.name == catalogue[path.stem].chapter
                place = (not in_chapter, "solutions" in path.parts, len(path.parts))
                copies.setdefault(path.stem, []).append((place, content))
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, ValueError) as error:
        return Submission(student, problems=dict.fromkeys(catalogue, f"{entry.name} cannot be read: {error}"))
    answers, problems = {}, {}
    for name, found in copies.items():
        best = min(place for place, _ in found)
        contents = {content for place, content in found if place == best}
        content = contents.pop()
        if contents:
            problems[name] = f"{name}.py is there {len(contents) + 1} times, with different contents"
        elif isinstance(content, str):
            problems[name] = content
        else:
            answers[name] = content
    return Submission(student, answers, problems)


def _read_folder(folder: Path) -> Iterator[tuple[PurePosixPath, bytes | str]]:
    """Yield the Python files of a folder: the path in it, and the content or what is wrong with it."""
    for count, (place, folders, names) in enumerate(os.walk(folder)):
        if count > _MAX_FILES:
            raise ValueError(f"it has more than {_MAX_FILES} folders")
        folders[:] = [name for name in folders if name not in _IGNORED]
        for file in (Path(place, name) for name in names if name.endswith(".py")):
            path = PurePosixPath(file.relative_to(folder))
            if file.is_symlink() or not file.is_file():
                yield path, f"{path} is a link"
            elif file.stat().st_size > MAX_BYTES:
                yield path, _describe_size_problem(path, file.stat().st_size)
            else:
                yield path, file.read_bytes()


def _read_zip(file: Path) -> Iterator[tuple[PurePosixPath, bytes | str]]:
    """Yield the Python files of a zip file, as `_read_folder` does.

    Contents are read up to the limit, whatever size the zip file states.
    """
    with zipfile.ZipFile(file) as archive:
        if len(archive.infolist()) > _MAX_FILES:
            raise ValueError(f"it has more than {_MAX_FILES} files")
        for entry in archive.infolist():
            path = PurePosixPath(entry.filename)
            if path.suffix == ".py" and not entry.is_dir():
                with archive.open(entry) as content:
                    read = content.read(MAX_BYTES + 1)
                yield path, read if len(read) <= MAX_BYTES else _describe_size_problem(path, entry.file_size)


def _describe_size_problem(path: PurePosixPath, size: int) -> str:
    """Return the message about a file that is too large."""
    return f"{path} has {size} bytes; an answer has at most {MAX_BYTES}"
