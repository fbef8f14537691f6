"""Standard streams that cannot end a program: closed ones are opened, and writes that fail are dropped.

A disk fills, the reader of a pipe ends, a terminal goes away: a run of hours must outlive what it prints.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

_NAMES = {1: "standard output", 2: "standard error"}


class _OutputFile(io.FileIO):
    """A file descriptor to write to that remembers its first failed write. failure: that error, or None.

    drops: whether failed writes are dropped instead of raising. The first one is then noted on the other one of
    standard output and standard error; a later write is tried again, since a full disk may have space by then.
    """

    def __init__(self, fd: int, drops: bool):
        super().__init__(fd, "w", closefd=False)
        self.failure: OSError | None = None
        self._drops = drops

    def write(self, data) -> int | None:
        """Write bytes; if that fails, remember the error and raise it, or drop the bytes."""
        try:
            return super().write(data)
        except OSError as error:
            is_first = self.failure is None
            self.failure = self.failure or error
            if not self._drops:
                raise
            if is_first:
                _note_failure(self.fileno(), error)
            return len(data)


def _note_failure(fd: int, error: OSError) -> None:
    """Say on the other one of standard output and standard error that writes to `fd` fail."""
    note = f"{_NAMES.get(fd, 'the output')} cannot be written: {error.strerror or error}. What is printed there is lost"
    with contextlib.suppress(OSError):
        os.write(1 if fd == 2 else 2, f"{note}; the program goes on.\n".encode())


def open_dropping_stream(fd: int, encoding: str = "utf-8") -> TextIO:
    """Return a text stream that writes to the descriptor `fd`, line by line, and drops what cannot be written.

    Characters that `encoding` lacks are written as escapes. Closing the stream leaves the descriptor open.
    """
    return _open_stream(_OutputFile(fd, drops=True), encoding)


def _open_stream(file: _OutputFile, encoding: str, line_buffering: bool = True) -> TextIO:
    """Return a text stream on `file`. Characters that `encoding` lacks are written as escapes."""
    buffer = io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=line_buffering)


@contextlib.contextmanager
def drop_failed_writes(*names: str) -> Iterator[None]:
    """Return a context manager inside which `sys.stdout`, `sys.stderr` or both drop what cannot be written.

    names: "stdout", "stderr". A stream without a file descriptor (a notebook's, a test's) stays as it is.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replace_stream(name, drops=True))
        yield


@contextlib.contextmanager
def _replace_stream(name: str, drops: bool) -> Iterator[_OutputFile | None]:
    """Return a context manager inside which `sys.stdout` or `sys.stderr` is a stream on an `_OutputFile`, its value.

    The value is None if the stream has no file descriptor; it then stays as it is.
    """
    before = getattr(sys, name)
    try:
        before.flush()
        file = _OutputFile(before.fileno(), drops)
    except (AttributeError, OSError, ValueError):
        yield None
        return
    stream = _open_stream(file, before.encoding, before.line_buffering or before.write_through)
    setattr(sys, name, stream)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            stream.flush()
        if getattr(sys, name) is stream:
            setattr(sys, name, before)


@contextlib.contextmanager
def watch_standard_output() -> Iterator[Callable[[BaseException], bool]]:
    """Return a context manager whose value tells whether an error is that of a write to standard output.

    After such an error what is still buffered is discarded at the end of the context, and standard output leads
    nowhere: the interpreter would try to write it once more when it exits.
    """
    with _replace_stream("stdout", drops=False) as file:
        try:
            yield lambda error: file is not None and error is file.failure
        finally:
            if file is not None and file.failure is not None:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, file.fileno())
                os.close(null)


def open_closed_streams() -> None:
    """Open those of descriptors 0, 1 and 2 that are closed, as after `>&-`, and the `sys` streams on them.

    What is written there is lost. Else the next file or socket that the process opens would have that number, and
    receive what is printed.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
