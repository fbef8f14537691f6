"""The learner's progress.json: edited by one process at a time, and written atomically."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidist.errors import UserError
from minidist.tools.output_files import write_atomically

NAME = "progress.json"


def find_progress_file(start: Path) -> Path | None:
    """Return the path of a learner's progress.json, in the folder `start` or the nearest parent that has one.

    None if there is no such folder.
    """
    for folder in (start, *start.parents):
        if (folder / NAME).is_file() and (folder / "exercises").is_dir():
            return folder / NAME
    return None


def read_progress(file: Path) -> dict[str, Any]:
    """Return the contents of a progress.json; {} if it does not exist. Raises UserError if it is damaged."""
    try:
        progress = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); move it away to begin a new one") from None
    if not isinstance(progress, dict):
        raise UserError(f"{file} does not hold a JSON object; move it away to begin a new one")
    return progress


@contextlib.contextmanager
def edit_progress(file: Path) -> Iterator[dict[str, Any]]:
    """Return a context manager that yields the contents of a progress.json as a dict, and writes them when it exits.

    The caller edits the dict in place. A lock on the file excludes other processes meanwhile. Raises UserError if the
    file is damaged.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress = read_progress(file)
        before = json.dumps(progress)
        yield progress
        if json.dumps(progress) != before:
            write_atomically(file, json.dumps(progress, indent=2) + "\n")
