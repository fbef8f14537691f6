"""Temporary folders that a check shares with the ranks it grades.

The learner's code can write there: it may leave links to other files, pipes, or files of any size. So the grader
reaches every file through a file descriptor of the folder, follows no link, and reads regular files up to a limit.
"""

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

_READ_BYTES = 1 << 20
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS


class Scratch:
    """A temporary folder. path: its name as the ranks know it. fd: an open descriptor of it."""

    def __init__(self, path: str, fd: int):
        self.path, self._fd = path, fd

    def write(self, name: str, content: bytes) -> str:
        """Write a file `FOLDER/NAME`, which other users may read, into this folder; return its path."""
        folder, _, file = name.rpartition("/")
        os.mkdir(folder, dir_fd=self._fd)
        inner = os.open(folder, _FOLDER, dir_fd=self._fd)
        try:
            os.fchmod(inner, 0o755)
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, dir_fd=inner)
        finally:
            os.close(inner)
        with open(fd, "wb") as written:
            written.write(content)
            os.fchmod(fd, 0o644)
        return f"{self.path}/{name}"

    def read(self, name: str) -> str | None:
        """Return the text of a file of this folder, at most 1 MiB; None if there is no such regular file."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=self._fd)
        except OSError:
            return None
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            return file.read(_READ_BYTES).decode(errors="replace")


def open_scratch(server: Any, writable: bool = False) -> contextlib.AbstractContextManager[Scratch]:
    """Return a context manager for a new scratch folder of the ranks of `server`; it is deleted at the end.

    writable: whether the ranks write there.
    """
    return server.open_scratch(writable) if hasattr(server, "open_scratch") else create_scratch()


@contextlib.contextmanager
def create_scratch(parent: str = "", parent_fd: int | None = None, owner: int | None = None) -> Iterator[Scratch]:
    """Return a context manager for a new scratch folder, which is deleted at the end.

    parent: the folder to create it in, as the ranks know it; "": the system's folder for temporary files. parent_fd: a
    descriptor of `parent`; None: `parent` has the same name here. owner: the user it belongs to; None: this one.
    """
    parent = parent or os.path.realpath(tempfile.gettempdir())
    opened = os.open(parent, _FOLDER) if parent_fd is None else os.dup(parent_fd)
    name = f"minidist-check-{secrets.token_hex(8)}"
    try:
        os.mkdir(name, 0o700, dir_fd=opened)
        try:
            fd = os.open(name, _FOLDER, dir_fd=opened)
            try:
                os.fchmod(fd, 0o755)
                if owner is not None:
                    os.fchown(fd, owner, owner)
                yield Scratch(f"{parent}/{name}", fd)
            finally:
                os.close(fd)
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=opened)
    finally:
        os.close(opened)
