"""The line a person would look for when an operation waits."""

import os
import sys

import torch

import minidist.comm
import minidist.tools

# A line of these packages is never the line that a reader looks for.
_INSIDE = tuple(os.path.dirname(os.path.abspath(p.__file__)) + os.sep for p in (minidist.comm, minidist.tools, torch))


def caller_line() -> str:
    """`file:line` of the innermost frame outside this folder and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
