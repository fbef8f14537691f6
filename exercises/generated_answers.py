"""Wrong answers that are alike in every exercise, so none of them is stored."""

import ast

from exercises.catalogue import Exercise, file_of
from minidist.errors import UserError


def cheat(exercise: Exercise) -> str:
    """An answer that calls the package's own functions and inherits from its classes. Only pieces have them."""
    if exercise.kind != "piece":
        raise UserError(f"{exercise.name}: only an exercise about a piece of the package has a generated cheat")
    imports = {module: f"import {module} as own_{i}" for i, module in enumerate(exercise.modules)}
    parts = ["\n".join(imports.values())]
    for piece in exercise.pieces:
        module, _, name = piece.partition(":")
        own = f"own_{exercise.modules.index(module)}.{name}"
        if _is_class(module, name):
            parts.append(f"class {name}({own}):\n    pass")
        else:
            parts.append(f"def {name}(*args, **kwargs):\n    return {own}(*args, **kwargs)")
    return "\n\n\n".join(parts) + "\n"


def _is_class(module: str, name: str) -> bool:
    nodes = {node.name: node for node in ast.parse(file_of(module).read_text()).body if hasattr(node, "name")}
    return isinstance(nodes[name], ast.ClassDef)
