"""Finds code in an answer that reaches for the internals of Python or of the grader, to manipulate its own grade.

It searches the source before any of it runs. The guard checks actions at run time, by the call stack; a frame or
compiled text could act where no line of the answer is on the stack. A name that the answer itself defines is its own,
whatever it is called.
"""

import ast
import threading
from collections.abc import Iterator

# Modules, however they are accessed.
_MODULES = {
    *("exercises", "exercise_tests", "importlib", "inspect", "ctypes", "builtins", "__builtins__", "runpy"),
    *("pkgutil", "pydoc", "multiprocessing"),
}
# Built-in functions, as bare names: `model.eval()` and `torch.compile` are allowed.
_FUNCTIONS = {"exec", "eval", "compile", "__import__"}
# Attributes, also as strings in a call of one of `_GETTERS`.
_ATTRIBUTES = {
    *("_getframe", "_current_frames", "settrace", "setprofile", "tb_frame", "f_back", "f_locals", "f_globals"),
    *("gi_frame", "__closure__", "__code__", "__globals__", "__guarded__", "__import__", "__subclasses__"),
    *("get_objects", "get_referrers", "get_referents"),
}
_GETTERS = {"getattr", "setattr", "delattr", "attrgetter", "methodcaller"}
_WHY = "an answer must not use the internals of Python or of the grader"
_PARSING = threading.Lock()


def parse_python(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a program; as `ast.parse`, one thread at a time.

    Threads that parse at the same time can get SystemError: "AST constructor recursion depth mismatch" (Python 3.11).
    """
    with _PARSING:
        return ast.parse(source)


def find_forbidden_code(source: bytes) -> tuple[int, str] | None:
    """Return the first forbidden line of an answer's source and the message about it; None if there is none.

    A source with a syntax error gives None: the check reports it.
    """
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    own = {name for node in nodes for name in _defined_names(node)}
    sys_names = {alias.asname or alias.name for node in nodes for alias in _aliases(node) if alias.name == "sys"}
    found = [(node.lineno, name) for node in nodes for name in _find_forbidden_names(node, own, sys_names | {"sys"})]
    if not found:
        return None
    line, name = min(found)
    return line, f"line {line} uses {name}: {_WHY}"


def _aliases(node: ast.AST) -> list[ast.alias]:
    """Return the imported names of an import statement; [] for other nodes."""
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _defined_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of the tree defines, other than by an import."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name


def _find_forbidden_names(node: ast.AST, own: set[str], sys_names: set[str]) -> Iterator[str]:
    """Yield the forbidden names in one node of the tree. own: the answer's own names; sys_names: those of sys."""
    match node:
        case ast.Import(names=names):
            yield from (part for alias in names for part in alias.name.split(".") if part in _MODULES)
        case ast.ImportFrom(module=module, names=names):
            parts = [*(module or "").split("."), *(alias.name for alias in names)]
            yield from (part for part in parts if part in _MODULES | _ATTRIBUTES | _FUNCTIONS)
            yield from (part for part in parts if module == "sys" and part == "modules")
        case ast.Name(id=name):
            if name in (_MODULES | _FUNCTIONS) - own:
                yield name
        case ast.Attribute(value=value, attr=name):
            yield from _check_attribute(value, name, sys_names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in _GETTERS:
            texts = [each.value for each in args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            for part in (part for text in texts for part in text.split(".")):
                yield from _check_attribute(args[0], part, sys_names)


def _check_attribute(value: ast.expr, name: str, sys_names: set[str]) -> Iterator[str]:
    """Yield the name of an attribute if it is forbidden; `modules` is only as `sys.modules`."""
    is_sys = isinstance(value, ast.Name) and value.id in sys_names or getattr(value, "attr", "") == "sys"
    if name in _MODULES | _ATTRIBUTES or name == "modules" and is_sys:
        yield name
