"""Finds code in an answer that reaches for the internals of Python or of the grader, to manipulate its own grade.

This is read in the text before anything of it runs. The guard watches what the code does; a thread, a frame or code
made from a text would do it where the guard sees no line of the answer.
"""

import ast
from collections.abc import Iterator

# Modules, however they are come by.
_MODULES = {
    *("exercises", "exercise_tests", "importlib", "inspect", "gc", "ctypes", "builtins", "__builtins__", "runpy"),
    *("pkgutil", "pydoc", "threading", "_thread", "concurrent", "multiprocessing"),
}
# Functions, when they are named alone: `model.eval()` and `torch.compile` are others.
_FUNCTIONS = {"exec", "eval", "compile", "__import__"}
# Attributes, also when they are asked for by a text. `modules` is one only where nothing calls it: those of a network
# are called, those of `sys` are not.
_ATTRIBUTES = {
    *("_getframe", "_current_frames", "settrace", "setprofile", "tb_frame", "f_back", "f_locals", "f_globals"),
    *("gi_frame", "__closure__", "__code__", "__globals__", "__guarded__", "__import__", "__subclasses__"),
    "modules",
}
_WHY = "an answer has no business with the insides of Python or of the check"


def find_forbidden_code(source: bytes) -> tuple[int, str] | None:
    """Return the first forbidden line of an answer's source and the message about it; None if there is none.

    A source that Python cannot read is left to be told as that.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    found = [(node.lineno, name) for node in nodes for name in _names(node, id(node) in called)]
    if not found:
        return None
    line, name = min(found)
    return line, f"line {line} uses {name}: {_WHY}"


def _names(node: ast.AST, called: bool) -> Iterator[str]:
    """What one node of the tree names that is forbidden."""
    match node:
        case ast.Import(names=names):
            yield from (part for alias in names for part in alias.name.split(".") if part in _MODULES)
        case ast.ImportFrom(module=module, names=names):
            parts = [*(module or "").split("."), *(alias.name for alias in names)]
            yield from (part for part in parts if part in _MODULES | _ATTRIBUTES | _FUNCTIONS)
        case ast.Name(id=name):
            if name in _MODULES | _FUNCTIONS:
                yield name
        case ast.Attribute(attr=name):
            if name in _MODULES | _ATTRIBUTES and not (name == "modules" and called):
                yield name
        case ast.Constant(value=str(text)):
            yield from (part for part in text.split(".") if part in _ATTRIBUTES)
