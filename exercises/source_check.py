"""Finds code in an answer that reaches for the internals of Python or of the grader, to manipulate its own grade.

It searches the source before any of it runs. The guard checks actions at run time, by the call stack; a thread, a frame
or compiled text could act where no line of the answer is on the stack.
"""

import ast
from collections.abc import Iterator

# Modules, however they are accessed.
_MODULES = {
    *("exercises", "exercise_tests", "importlib", "inspect", "gc", "ctypes", "builtins", "__builtins__", "runpy"),
    *("pkgutil", "pydoc", "threading", "_thread", "concurrent", "multiprocessing"),
}
# Built-in functions, as bare names: `model.eval()` and `torch.compile` are allowed.
_FUNCTIONS = {"exec", "eval", "compile", "__import__"}
# Attributes, also as strings. `modules` is forbidden only if it is not called: `sys.modules`, not `net.modules()`.
_ATTRIBUTES = {
    *("_getframe", "_current_frames", "settrace", "setprofile", "tb_frame", "f_back", "f_locals", "f_globals"),
    *("gi_frame", "__closure__", "__code__", "__globals__", "__guarded__", "__import__", "__subclasses__"),
    "modules",
}
_WHY = "an answer must not use the internals of Python or of the grader"


def find_forbidden_code(source: bytes) -> tuple[int, str] | None:
    """Return the first forbidden line of an answer's source and the message about it; None if there is none.

    A source with a syntax error gives None: the check reports it.
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
    """Yield the forbidden names in one node of the tree."""
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
