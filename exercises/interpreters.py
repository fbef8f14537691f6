"""The hashes and the sets of an answer, which differ between the ranks of a check as between interpreters.

Python salts the hashes of texts anew in each interpreter, and the order of a set follows from the hashes of its
elements. The ranks of a check are forks of one interpreter, and would agree where those of a real run do not. So an
answer is loaded with a `hash`, a `set` and a `frozenset` that depend on the rank and on nothing else, and its set
displays and set comprehensions make such sets. Numbers keep their hashes and their order, as they do in Python.

Not covered: sets that other code makes, such as the intersection of the keys of two dictionaries.
"""

import ast
import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import CodeType, ModuleType
from typing import Any

_MADE_SET = "__made_set__"  # in the answer's module: the class of what `{a, b}` is
_number = 0  # of the interpreter that this process plays


@contextlib.contextmanager
def interpreter(number: int) -> Iterator[None]:
    """Return a context manager in which an answer runs as in another interpreter. 0 is that of rank 0."""
    global _number
    before, _number = _number, number
    try:
        yield
    finally:
        _number = before


def load_answer_file(name: str, file: str, rank: int | None = None) -> ModuleType:
    """Load a learner's file as module `name`, in the interpreter of a rank; return the module. None: the one of now."""
    global _number
    _number = _number if rank is None else rank
    spec = importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file))
    module = importlib.util.module_from_spec(spec)
    vars(module).update({"hash": _hash, "set": _Set, "frozenset": _FrozenSet, _MADE_SET: _Set})
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file whose set displays and comprehensions make sets of this module."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        return _compile(bytes(data), path, _optimize)


@functools.cache  # every test of a rank loads the same file
def _compile(data: bytes, path: str, optimize: int) -> CodeType:
    """Compile a program whose sets are made by this module."""
    tree = _Sets().visit(ast.parse(data, path))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=optimize)


class _Sets(ast.NodeTransformer):
    """Replaces `{a, b}` and `{a for a in b}` by calls that make the set from them."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        return self._make(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._make(node)

    def _make(self, node: ast.expr) -> ast.AST:
        self.generic_visit(node)
        made = ast.Call(ast.Name(_MADE_SET, ast.Load()), [node], [])
        return ast.copy_location(made, node)


def _hash(value: Any) -> int:
    """Return a hash that differs between interpreters for all but numbers, as Python's does."""
    return hash(value) if isinstance(value, int | float) else hash((f"interpreter {_number}", value))


def _has_fixed_hash(value: Any) -> bool:
    """Return whether a value has the same hash in every interpreter."""
    if isinstance(value, tuple | builtins.frozenset):
        return all(map(_has_fixed_hash, value))
    return isinstance(value, int | float | complex)


def _place(value: Any) -> int:
    """Return a number that decides where a value is in a set: equal for equal values, in every process of a check."""
    if isinstance(value, str | bytes):
        return zlib.crc32(value.encode(errors="replace") if isinstance(value, str) else value)
    if isinstance(value, tuple):
        return zlib.crc32(repr([_place(each) for each in value]).encode())
    if isinstance(value, builtins.frozenset):
        return sum(map(_place, builtins.frozenset.__iter__(value)))
    if is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        return _place(tuple(getattr(value, each.name) for each in fields(value)))
    return hash(value) if _has_fixed_hash(value) else zlib.crc32(type(value).__qualname__.encode())


def _in_order(elements: list) -> list:
    """Return the elements of a set in the order that it has in this interpreter."""
    if all(map(_has_fixed_hash, elements)):
        return elements
    ordered = sorted(elements, key=_place)
    return ordered[::-1] if _number % 2 else ordered


class _LooksBuiltin(type):
    """The type of `set` in an answer, of which every set is an instance; not so of classes that inherit from it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.builtin) if "builtin" in vars(cls) else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.builtin) if "builtin" in vars(cls) else super().__subclasscheck__(subclass)


def _operation(builtin: type, name: str) -> Callable:
    """Return a method of the built-in class whose result is a set of this module if it is a built-in one."""
    method = getattr(builtin, name)

    def operation(self: Any, *others: Any) -> Any:
        result = method(self, *others)
        if type(result) is not builtin:
            return result
        return _Set(result) if builtin is builtins.set else _FrozenSet(result)

    operation.__name__ = name
    return operation


def _methods(builtin: type) -> dict[str, Any]:
    """Return the methods of a subclass of `set` or `frozenset` whose order is that of this interpreter."""
    names = ["union", "intersection", "difference", "symmetric_difference", "copy"]
    names += [f"__{side}{name}__" for name in ("or", "and", "sub", "xor") for side in ("", "r")]

    def __iter__(self: Any) -> Iterator:
        return iter(_in_order([*builtin.__iter__(self)]))

    def __repr__(self: Any) -> str:
        inside = f"{{{', '.join(map(repr, self))}}}" if self else ""
        return inside if inside and builtin is builtins.set else f"{builtin.__name__}({inside})"

    def __reduce__(self: Any) -> tuple:
        return builtin, ([*self],)  # what is sent to another rank arrives as a built-in set

    own = {"builtin": builtin, "__iter__": __iter__, "__repr__": __repr__, "__reduce__": __reduce__}
    return own | {name: _operation(builtin, name) for name in names}


def _pop(self: Any) -> Any:
    """Remove the first element and return it."""
    for value in self:
        self.remove(value)
        return value
    raise KeyError("pop from an empty set")


_Set = _LooksBuiltin("set", (set,), _methods(set) | {"pop": _pop})
_FrozenSet = _LooksBuiltin("frozenset", (frozenset,), _methods(frozenset))
