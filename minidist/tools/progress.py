"""progress.json of a learner's folder: changed by one process at a time, and whole or not at all."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidist.errors import UserError

NAME = "progress.json"


def find(start: Path) -> Path | None:
    """The progress.json of the learner's folder that `start` lies in; None when it lies in none."""
    for folder in (start, *start.parents):
        if (folder / NAME).is_file() and (folder / "exercises").is_dir():
            return folder / NAME
    return None


def read(file: Path) -> dict[str, Any]:
    """What the file holds; empty when there is none. Raises UserError when it is damaged."""
    try:
        progress = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); move it away to begin a new one") from None
    if not isinstance(progress, dict):
        raise UserError(f"{file} holds no table; move it away to begin a new one")
    return progress


@contextlib.contextmanager
def changing(file: Path) -> Iterator[dict[str, Any]]:
    """The content, to be changed in place. What others keep there stays. Raises what `read` raises."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress = read(file)
        before = json.dumps(progress)
        yield progress
        if json.dumps(progress) != before:
            write_whole(file, (json.dumps(progress, indent=2) + "\n").encode())


def write_whole(file: Path, content: bytes) -> None:
    """Write a file whole or not at all, also when the machine stops."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, file)
    except BaseException:
        os.unlink(beside)
        raise
