"""Replaceable symbols: replace the source of a function or class of the package, for every reference to it.

`from module import f` copies a reference, so assigning to the module does not reach earlier imports. Here the object
itself stays and its contents are replaced: a function gets new code, a class new attributes. Earlier imports, callbacks
and instances use the new definition from the next call on.

The new source runs in the namespace of its module, so it may use everything that the module imports. A symbol is named
`module:symbol` or `module:Class.method`; the notebook magic `%%piece` takes such a name.
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

# Attributes that belong to the class object itself, not to its definition.
_KEPT = {"__dict__", "__weakref__"}
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__dict__")


@dataclass
class SymbolReplacements:
    """Replaces functions and classes of the package in this process by other source, and restores the originals.

    Iterating yields the names of the replaced symbols, such as "module:function".
    """

    _originals: dict[str, Any] = field(default_factory=dict)
    _added: dict[tuple[str, str], str] = field(default_factory=dict)  # sources of new names, by module and name

    def replace_symbol(
        self,
        symbol: str,
        source: str,
        filename: str | None = None,
        transform: Callable[[ast.Module], ast.Module] | None = None,
        also_replaced: Collection[str] = (),
    ) -> None:
        """Replace the definition of a function or class by the one in `source`, for all references in this process.

        symbol: `module:function`, `module:Class` or `module:Class.method`. filename: shown in tracebacks for the new
        source; `<piece SYMBOL>` if None. transform: applied to the parsed source before it runs. also_replaced: names
        of other symbols of the module that other calls replace: `source` may define them too, which this call ignores.
        Raises UserError if there is no such symbol, if it is neither function nor class, or if `source` does not define
        it, changes its base classes, or redefines another name of the module, other than a helper that the same source
        has defined for an earlier symbol; SyntaxError, or any exception from running the source. After an error the old
        definition is unchanged.
        """
        module, holder, attribute = _find_symbol(symbol)
        old = _unwrap(inspect.getattr_static(holder, attribute))
        if not isinstance(old, FunctionType | type):
            raise UserError(f"{symbol} is a {type(old).__name__}; only functions and classes can be replaced")
        helpers = [name for (place, name), text in self._added.items() if (place, text) == (module.__name__, source)]
        before, known = set(vars(module)), (*also_replaced, *helpers)
        new = _define(source, module, attribute, filename or f"<piece {symbol}>", symbol, transform, known)
        self._added |= {(module.__name__, name): source for name in vars(module).keys() - before}
        if isinstance(old, type) != isinstance(new, type):
            kinds = {True: "class", False: "function"}
            raise UserError(
                f"{symbol} is a {kinds[isinstance(old, type)]}, the new source defines a {kinds[isinstance(new, type)]}"
            )
        if isinstance(old, FunctionType) and len(old.__code__.co_freevars) != len(new.__code__.co_freevars):
            raise UserError(
                f"{symbol} uses super() or variables around it, and its replacement does not (or the reverse)"
            )
        if isinstance(old, type) and old.__bases__ != _resolve_bases(module, new, also_replaced):
            bases = [", ".join(base.__name__ for base in each.__bases__) for each in (old, new)]
            raise UserError(f"{symbol} inherits from {bases[0]}, its replacement from {bases[1]}; the bases must stay")
        self._originals.setdefault(symbol, _get_contents(old))
        _set_contents(old, _get_contents(new), new)

    def restore_symbols(self, symbol: str | None = None) -> list[str]:
        """Restore the original of `symbol`, or of all replaced symbols if it is None; return the restored names."""
        names = list(self._originals) if symbol is None else [symbol] if symbol in self._originals else []
        for each in names:
            _, holder, attribute = _find_symbol(each)
            old = _unwrap(inspect.getattr_static(holder, attribute))
            _set_contents(old, self._originals.pop(each), old)
        return names

    def __iter__(self) -> Iterator[str]:
        return iter(self._originals)


def read_symbol_source(symbol: str) -> str:
    """Return the source of a symbol, such as "module:function", as it is in its file, dedented."""
    _, holder, attribute = _find_symbol(symbol)
    return textwrap.dedent(inspect.getsource(_unwrap(inspect.getattr_static(holder, attribute))))


def _find_symbol(name: str) -> tuple[ModuleType, Any, str]:
    """Return the symbol's module, its owner (the module or a class in it), and its own name."""
    module_name, _, path = name.partition(":")
    if not path:
        raise UserError(f"{name!r} is not a symbol; write module:symbol, like minidist.data.partition:block_partition")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"there is no module {module_name}: {error}") from None
    holder: Any = module
    *classes, symbol = path.split(".")
    for part in [*classes, symbol]:
        if part not in vars(holder):
            known = [key for key, value in vars(holder).items() if isinstance(value, FunctionType | type)]
            raise UserError(
                f"{module_name} has no {path}; it has {', '.join(sorted(known)) or 'no functions or classes'}"
            )
        holder = vars(holder)[part] if part in classes else holder
    return module, holder, symbol


def _define(
    source: str,
    module: ModuleType,
    symbol: str,
    filename: str,
    name: str,
    transform: Callable | None,
    also_replaced: Collection[str],
) -> Any:
    """Run the source in the module's namespace and return its definition of `symbol`; the namespace is restored."""
    source = textwrap.dedent(source)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # A function looks up its globals in the dictionary that it was created with, which must be the module's own. So
    # the source runs there, and the names that it overwrote are restored.
    namespace, before = vars(module), dict(vars(module))
    code = compile(source, filename, "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST if transform else 0)
    if transform:
        code = compile(transform(code), filename, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
        new = namespace.get(symbol)
        if symbol not in namespace or (symbol in before and new is before[symbol]):
            raise UserError(f"the new source of {name} defines no {symbol}")
        displaced = {key for key in before if key in namespace and namespace[key] is not before[key]}
        if others := sorted(key for key in displaced - {symbol, *also_replaced} if not key.startswith("__")):
            conflict = f"{', '.join(others)}, which {module.__name__} has already; give it another name"
            raise UserError(f"the new source of {name} defines {conflict}")
    except BaseException:
        for key in namespace.keys() - before.keys():
            del namespace[key]
        raise
    finally:
        namespace.update(before)
    if symbol not in before:  # a method, which belongs to its class only
        del namespace[symbol]
    return _unwrap(new)


def _resolve_bases(module: ModuleType, new: type, also_replaced: Collection[str]) -> tuple[type, ...]:
    """Return the base classes of `new`; for a base that another call replaces, the module's class of that name.

    The other call changes the contents of the module's class.
    """
    return tuple(vars(module)[base.__name__] if base.__name__ in also_replaced else base for base in new.__bases__)


def _unwrap(value: Any) -> Any:
    """Return the function inside a static method, class method or property."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _get_contents(value: FunctionType | type) -> dict[str, Any]:
    """Return the parts of a function or class that a replacement exchanges, by name."""
    if isinstance(value, type):
        return {key: item for key, item in vars(value).items() if key not in _KEPT}
    return {part: getattr(value, part) for part in _FUNCTION_PARTS}


def _set_contents(target: FunctionType | type, contents: dict[str, Any], source: Any) -> None:
    """Give a function or class these contents. source: the new definition from which they are taken."""
    if isinstance(target, FunctionType):
        for part, item in contents.items():
            setattr(target, part, dict(item) if isinstance(item, dict | MappingProxyType) else item)
        return
    for key in [key for key in vars(target) if key not in _KEPT and key not in contents]:
        delattr(target, key)
    for key, item in contents.items():
        _rebind_super(item, source, target)
        setattr(target, key, item)


def _rebind_super(item: Any, born_in: type, home: type) -> None:
    """Point the `__class__` cells of methods that use `super()` from class `born_in` to class `home`.

    item: an attribute of the class.
    """
    parts = (item.fget, item.fset, item.fdel) if isinstance(item, property) else (_unwrap(item),)
    for function in parts:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is born_in:
                cell.cell_contents = home
