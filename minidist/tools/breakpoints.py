"""`breakpoint()` where nobody can type at a debugger: the variables at that line, as text."""

import types
from collections.abc import Collection
from typing import Any

MAX_VARIABLES = 12
_MAX_TEXT = 80
_MAX_ELEMENTS = 8


def format_variables(frame: types.FrameType, hidden: Collection[str] = ()) -> list[str]:
    """Return a line `name = value` for each local variable of a frame, at most MAX_VARIABLES and a line for the rest.

    Modules, functions, classes and names that begin with an underscore are left out, as are those in `hidden`.
    """
    code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    names = [
        name
        for name, value in frame.f_locals.items()
        if not name.startswith("_") and name not in hidden and not isinstance(value, code)
    ]
    lines = [f"{name} = {_format_value(frame.f_locals[name])}" for name in names[:MAX_VARIABLES]]
    return lines + ([f"... and {len(names) - MAX_VARIABLES} more"] if len(names) > MAX_VARIABLES else [])


def _format_value(value: Any) -> str:
    """Return the value in one line; of a large tensor, its shape and dtype."""
    try:
        if hasattr(value, "numel") and value.numel() > _MAX_ELEMENTS:
            return f"tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
        text = " ".join(repr(value).split())
    except Exception as error:  # of the learner's __repr__
        return f"a {type(value).__name__} whose repr raised {type(error).__name__}"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."
