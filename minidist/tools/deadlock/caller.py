"""The line of a program that is waiting for communication."""

import functools
import os
import sys


@functools.cache
def _internal_folders() -> tuple[str, ...]:
    """Folders whose frames are never the line that a reader looks for."""
    import torch  # here: whoever only reads status pages starts without torch

    import minidist.comm
    import minidist.tools

    return tuple(os.path.dirname(os.path.abspath(p.__file__)) + os.sep for p in (minidist.comm, minidist.tools, torch))


def caller_line() -> str:
    """Return `file:line` of the innermost frame outside `minidist.comm`, `minidist.tools` and torch."""
    frame, internal = sys._getframe(1), _internal_folders()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(internal):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
