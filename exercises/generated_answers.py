"""Generate the wrong answers cheat, zero and constant from the solution of a piece.

Programs, predictions and classes have theirs in the answers files: `exercises.answers`.
"""

import ast

from exercises.catalogue import Exercise, module_file
from minidist.errors import UserError

CONSTANT_RESULTS = {"wrong_zero": 0, "wrong_constant": 3}

# Appended to the solution, whose functions it wraps.
_CONSTANT_RESULTS_CODE = '''

import functools

import numpy
import torch


def _filled(value):
    """The value with {number} in the place of every number in it."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, {number})
    if isinstance(value, numpy.ndarray):
        return numpy.full_like(value, {number})
    if isinstance(value, bool | int | float):
        return type(value)({number})
    if isinstance(value, dict):
        return {{key: _filled(each) for key, each in value.items()}}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_filled, value))
    return type(value)(map(_filled, value)) if isinstance(value, list | tuple) else value


def _tensors(values):
    """The tensors among the values, and in lists among them."""
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return found + [each for value in values if isinstance(value, list | tuple) for each in _tensors(value)]


def _with_filled_results(function):
    """The function, with {number} in everything that it returns, and in every tensor argument that it changes."""

    @functools.wraps(function)
    def filled(*args, **kwargs):
        tensors = _tensors([*args, *kwargs.values()])
        before = [tensor.detach().clone() for tensor in tensors]
        result = function(*args, **kwargs)
        for tensor, old in zip(tensors, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.fill_({number})
        return _filled(result)

    return filled


'''


def generate_cheat(exercise: Exercise) -> str:
    """Generate an answer that calls the package's own functions and inherits from its classes."""
    if exercise.kind != "piece":
        raise UserError(f"{exercise.name}: only an exercise about a piece of the package has a generated cheat")
    imports = {module: f"import {module} as own_{i}" for i, module in enumerate(exercise.modules)}
    parts = ["\n".join(imports.values())]
    for piece in exercise.pieces:
        module, _, name = piece.partition(":")
        own = f"own_{exercise.modules.index(module)}.{name}"
        if _is_class(piece):
            parts.append(f"class {name}({own}):\n    pass")
        else:
            parts.append(f"def {name}(*args, **kwargs):\n    return {own}(*args, **kwargs)")
    return "\n\n\n".join(parts) + "\n"


def generate_constant_results(exercise: Exercise, solution: str, name: str) -> str:
    """Generate the solution with one number in place of all results: 0 for wrong_zero, 3 for wrong_constant."""
    if exercise.kind != "piece" or _is_class(exercise.piece):
        raise UserError(f"{exercise.name}: only an exercise about a function of the package has a generated {name}")
    functions = [piece.split(":")[1] for piece in exercise.pieces if not _is_class(piece)]
    wrapped = "".join(f"{function} = _with_filled_results({function})\n" for function in functions)
    return solution + _CONSTANT_RESULTS_CODE.format(number=CONSTANT_RESULTS[name]) + wrapped


def _is_class(piece: str) -> bool:
    """Return whether a piece, `module:symbol`, is a class."""
    module, _, name = piece.partition(":")
    nodes = {node.name: node for node in ast.parse(module_file(module).read_text()).body if hasattr(node, "name")}
    return isinstance(nodes[name], ast.ClassDef)
