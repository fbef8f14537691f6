"""The learner's folder `work/`: copies of stubs and notebooks, progress.json, and AGENTS.md for AI assistants.

Nothing here writes outside that folder. A file that the learner has edited is never overwritten: the hash of each copy
is stored, and only a file that still has it is updated.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exercises.catalogue import Catalogue, Exercise
from minidist.tools import progress
from minidist.tools.output_files import write_atomically

AGENTS = "AGENTS.md"  # the file in which AI assistants look for instructions
_FOR_ASSISTANTS = "learner_agents.md"  # its text, under a name that does not address assistants of the course's authors


class Work:
    """The learner's folder: the files of exercises and the record of progress. It need not exist yet."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, exercise: Exercise) -> Path:
        """Return the path of the learner's file."""
        return self.folder / "exercises" / exercise.chapter / f"{exercise.name}.py"

    def update(self, catalogue: Catalogue) -> dict[str, list[Path]]:
        """Copy new files. Returns them as `added`, `renewed` (out of date, unedited) or `kept` (edited)."""
        done: dict[str, list[Path]] = {"added": [], "renewed": [], "kept": []}
        with self._edit_progress() as kept:
            copied = kept.setdefault("files", {})
            for target, content in self._course_files(catalogue):
                name, now = str(target.relative_to(self.folder)), _digest(content)
                if not target.exists():
                    done["added"].append(target)
                elif _digest(target.read_bytes()) == now:
                    copied[name] = now
                    continue
                elif _digest(target.read_bytes()) == copied.get(name):
                    done["renewed"].append(target)
                else:
                    if copied.get(name) != now:
                        done["kept"].append(target)
                    continue
                write_atomically(target, content)
                copied[name] = now
        return done

    def next_exercise(self, catalogue: Catalogue) -> Exercise | None:
        """Return the first exercise that the learner has not passed, optional ones last; None if all are passed."""
        left = [exercise for exercise in catalogue.values() if not self.entry(exercise).get("passed")]
        return min(left, key=lambda exercise: exercise.optional, default=None)

    def reset(self, exercise: Exercise) -> Path | None:
        """Replace the learner's file by the stub; return the backup, None if no file was edited."""
        file, content = self.file(exercise), exercise.stub.read_bytes()
        backup = self._make_backup(file) if file.exists() and file.read_bytes() != content else None
        with self._edit_progress() as kept:
            write_atomically(file, content)
            kept.setdefault("files", {})[str(file.relative_to(self.folder))] = _digest(content)
        return backup

    def open_in_cell(self, exercise: Exercise) -> str:
        """Return the text of the learner's file for a new notebook cell; create the file from the stub if necessary."""
        file = self.file(exercise)
        if not file.exists():
            self.reset(exercise)
        self._store_cell_hash(exercise, file.read_bytes())
        return file.read_text()

    def write_from_cell(self, exercise: Exercise, text: str) -> Path | None:
        """Write `text` to the learner's file; return the backup if it was edited outside the cell since, else None."""
        file, content, backup = self.file(exercise), text.encode(), None
        before = file.read_bytes() if file.exists() else exercise.stub.read_bytes()
        known = (self.entry(exercise).get("cell"), _digest(content), _digest(exercise.stub.read_bytes()))
        if _digest(before) not in known:
            backup = self._make_backup(file)
        write_atomically(file, content)
        self._store_cell_hash(exercise, content)
        return backup

    def _store_cell_hash(self, exercise: Exercise, content: bytes) -> None:
        """Record the content that the notebook cell has written or read, to notice other edits."""
        with self._edit_progress() as kept:
            kept.setdefault("exercises", {}).setdefault(exercise.name, {})["cell"] = _digest(content)

    def _make_backup(self, file: Path) -> Path:
        """Copy a file to the next free backup name; return the copy."""
        number = 1
        while (backup := file.with_name(f"{file.stem}.backup-{number}{file.suffix}")).exists():
            number += 1
        write_atomically(backup, file.read_bytes())
        return backup

    def record(self, exercise: Exercise, passed: bool, points: int, content: bytes) -> None:
        """Record an attempt and the best result. content: of the graded file."""
        with self._edit_progress() as kept:
            entry = kept.setdefault("exercises", {}).setdefault(exercise.name, {})
            entry["attempts"] = entry.get("attempts", 0) + 1
            entry["passed"] = bool(entry.get("passed") or passed)
            entry["points"] = max(entry.get("points", 0), points)
            if passed:
                entry["sha256"] = _digest(content)

    def is_unchanged_since_pass(self, exercise: Exercise) -> bool:
        """Return whether the learner's file is unchanged since it last passed."""
        file = self.file(exercise)
        return file.is_file() and self.entry(exercise).get("sha256") == _digest(file.read_bytes())

    def is_edited(self, exercise: Exercise) -> bool:
        """Return whether the learner's file is there and is neither the stub nor the copy of an earlier stub."""
        file = self.file(exercise)
        if not file.is_file():
            return False
        copied = self.read().get("files", {}).get(str(file.relative_to(self.folder)))
        return _digest(file.read_bytes()) not in (copied, _digest(exercise.stub.read_bytes()))

    def reveal_next_hint(self, exercise: Exercise) -> int:
        """Record that one more hint is shown; return the number of hints seen."""
        with self._edit_progress() as kept:
            entry = kept.setdefault("exercises", {}).setdefault(exercise.name, {})
            entry["hints"] = min(entry.get("hints", 0) + 1, len(exercise.hints))
            return entry["hints"]

    def entry(self, exercise: Exercise) -> dict[str, Any]:
        """Return the record of one exercise: attempts, passed, points, hints; empty if it was never tried."""
        return self.read().get("exercises", {}).get(exercise.name, {})

    def read(self) -> dict[str, Any]:
        """Read progress.json; empty if there is none. Raises UserError if it is damaged."""
        return progress.read_progress(self.folder / progress.NAME)

    def _edit_progress(self) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Return a context manager that yields the contents of progress.json and writes them when it exits."""
        return progress.edit_progress(self.folder / progress.NAME)

    def _course_files(self, catalogue: Catalogue) -> Iterator[tuple[Path, bytes]]:
        """Yield the course's files for the learner: (destination, content)."""
        for exercise in catalogue.values():
            yield self.file(exercise), exercise.stub.read_bytes()
        chapters = catalogue.root / "chapters"
        for notebook in sorted(chapters.glob("[0-9]*/*.ipynb")):
            yield self.folder / "chapters" / notebook.relative_to(chapters), _read_without_outputs(notebook)
        if (agents := catalogue.root / "exercises" / _FOR_ASSISTANTS).is_file():
            yield self.folder / AGENTS, agents.read_bytes()


def _read_without_outputs(notebook: Path) -> bytes:
    """Return the content of a notebook without the outputs of its cells."""
    content = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _digest(content: bytes) -> str:
    """Return the hash by which a copy's content is remembered."""
    return hashlib.sha256(content).hexdigest()
