"""Replaceable pieces: put other source in the place of a function or class of the package, for everybody who has it.

`from module import f` copies a reference, so assigning to the module reaches only those who look it up there. Here the
object itself stays and its inside is exchanged: a function gets other code, a class other attributes. Whoever imported
it earlier, holds it as a callback or is an instance of it has the new one from the next call on.

The new source runs in the namespace of its module, so it may use whatever the module imports. A piece is named
`module:symbol` or `module:Class.method`.
"""

import ast
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from minidist.errors import UserError

# What belongs to the class object itself, not to its definition.
_KEPT = {"__dict__", "__weakref__"}
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__dict__")


@dataclass
class Pieces:
    """The replacements made in this process, and how to undo them. Passed around; there is no global one."""

    _originals: dict[str, Any] = field(default_factory=dict)

    def replace(
        self,
        name: str,
        source: str,
        filename: str | None = None,
        prepare: Callable[[ast.Module], ast.Module] | None = None,
        beside: Collection[str] = (),
    ) -> None:
        """Give the symbol `name` the definition in `source`, everywhere.

        filename: what tracebacks call the source; `<piece name>` when not given. prepare: changes the parsed source.
        beside: other symbols of the module that the source may define, because they are replaced as well.
        Raises UserError when there is no such symbol, it is neither function nor class, or `source` does not define it,
        gives it other base classes, or gives another name of the module another meaning;
        SyntaxError or whatever running the source raises. Nothing has changed then.
        """
        module, holder, symbol = _find(name)
        old = _unwrapped(inspect.getattr_static(holder, symbol))
        if not isinstance(old, FunctionType | type):
            raise UserError(f"{name} is a {type(old).__name__}; only functions and classes can be replaced")
        new = _define(source, module, symbol, filename or f"<piece {name}>", name, prepare, beside)
        if isinstance(old, type) != isinstance(new, type):
            kinds = {True: "class", False: "function"}
            raise UserError(
                f"{name} is a {kinds[isinstance(old, type)]}, the new source defines a {kinds[isinstance(new, type)]}"
            )
        if isinstance(old, FunctionType) and len(old.__code__.co_freevars) != len(new.__code__.co_freevars):
            raise UserError(
                f"{name} uses super() or variables around it, and its replacement does not (or the reverse)"
            )
        if isinstance(old, type) and old.__bases__ != new.__bases__:
            bases = [", ".join(base.__name__ for base in each.__bases__) for each in (old, new)]
            raise UserError(f"{name} inherits from {bases[0]}, its replacement from {bases[1]}; the bases must stay")
        self._originals.setdefault(name, _inside(old))
        _put(old, _inside(new), new)

    def reset(self, name: str | None = None) -> list[str]:
        """Put the original back (all of them when no name is given); returns what was replaced."""
        names = list(self._originals) if name is None else [name] if name in self._originals else []
        for each in names:
            _, holder, symbol = _find(each)
            old = _unwrapped(inspect.getattr_static(holder, symbol))
            _put(old, self._originals.pop(each), old)
        return names

    def __iter__(self) -> Iterator[str]:
        return iter(self._originals)


def source_of(name: str) -> str:
    """The source text of a piece as it stands in its file, without the indentation of a method."""
    _, holder, symbol = _find(name)
    return textwrap.dedent(inspect.getsource(_unwrapped(inspect.getattr_static(holder, symbol))))


def _find(name: str) -> tuple[ModuleType, Any, str]:
    """The module, what holds the symbol (the module or a class in it), and the symbol's own name."""
    module_name, _, path = name.partition(":")
    if not path:
        raise UserError(f"{name!r} names no piece; write module:symbol, like minidist.data.partition:block")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"there is no module {module_name}: {error}") from None
    holder: Any = module
    *classes, symbol = path.split(".")
    for part in [*classes, symbol]:
        if part not in vars(holder):
            known = [key for key, value in vars(holder).items() if isinstance(value, FunctionType | type)]
            raise UserError(f"{module_name} has no {path}; it has {', '.join(sorted(known)) or 'no pieces'}")
        holder = vars(holder)[part] if part in classes else holder
    return module, holder, symbol


def _define(
    source: str,
    module: ModuleType,
    symbol: str,
    filename: str,
    name: str,
    prepare: Callable | None,
    beside: Collection[str],
) -> Any:
    """Run the source over the module's namespace and return what it calls `symbol`; the module itself is untouched."""
    source = textwrap.dedent(source)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # A function looks up its globals in the one dictionary it was made with, which must be the module's own. So the
    # source runs there, and what it displaced is put back.
    namespace, before = vars(module), dict(vars(module))
    code = compile(source, filename, "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST if prepare else 0)
    if prepare:
        code = compile(prepare(code), filename, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
        new = namespace.get(symbol)
        if symbol not in namespace or (symbol in before and new is before[symbol]):
            raise UserError(f"the new source of {name} defines no {symbol}")
        displaced = {key for key in before if key in namespace and namespace[key] is not before[key]}
        if others := sorted(key for key in displaced - {symbol, *beside} if not key.startswith("__")):
            told = f"{', '.join(others)}, which {module.__name__} has already; give it another name"
            raise UserError(f"the new source of {name} defines {told}")
    except BaseException:
        for key in namespace.keys() - before.keys():
            del namespace[key]
        raise
    finally:
        namespace.update(before)
    if symbol not in before:  # a method, which belongs to its class alone
        del namespace[symbol]
    return _unwrapped(new)


def _unwrapped(value: Any) -> Any:
    """The function inside a static method, class method or property getter."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _inside(value: FunctionType | type) -> dict[str, Any]:
    if isinstance(value, type):
        return {key: item for key, item in vars(value).items() if key not in _KEPT}
    return {part: getattr(value, part) for part in _FUNCTION_PARTS}


def _put(target: FunctionType | type, inside: dict[str, Any], source: Any) -> None:
    if isinstance(target, FunctionType):
        for part, item in inside.items():
            setattr(target, part, dict(item) if isinstance(item, dict | MappingProxyType) else item)
        return
    for key in [key for key in vars(target) if key not in _KEPT and key not in inside]:
        delattr(target, key)
    for key, item in inside.items():
        _adopt(item, source, target)
        setattr(target, key, item)


def _adopt(item: Any, born_in: type, home: type) -> None:
    """Let methods that know the class they were written in (`super()` does) know the one they now live in."""
    parts = (item.fget, item.fset, item.fdel) if isinstance(item, property) else (_unwrapped(item),)
    for function in parts:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is born_in:
                cell.cell_contents = home
