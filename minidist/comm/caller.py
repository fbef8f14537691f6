"""The line a person would look for when an operation waits."""

import os
import sys

import torch

# A line of these folders is never the line a person would look for.
_INSIDE = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.abspath(torch.__file__)))


def caller_line() -> str:
    """`file:line` of the innermost frame outside this folder and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
