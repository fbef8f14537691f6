"""The line of a program that is waiting for communication."""

import functools
import os
import sys
from types import FrameType


@functools.cache
def _internal_folders() -> tuple[str, ...]:
    """Return the folders whose frames are not the caller's: the package's communication code, its tools, and torch."""
    import torch  # not at the top: a process that only reads status pages needs no torch

    import minidist.comm
    import minidist.tools

    return tuple(os.path.dirname(os.path.abspath(p.__file__)) + os.sep for p in (minidist.comm, minidist.tools, torch))


@functools.cache
def _is_internal(file: str) -> bool:
    """Return whether a file of code is in one of these folders."""
    return file.startswith(_internal_folders())


def find_user_code_line(frame: FrameType | None = None) -> str:
    """Return the line of the user's program that a thread is running, as "file:line".

    This is the line of the innermost stack frame outside `minidist.comm`, `minidist.tools` and torch. frame: the
    innermost frame of the thread; None: of the calling thread.
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
