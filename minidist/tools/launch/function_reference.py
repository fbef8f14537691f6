"""References to functions, by which they are sent to ranks: module or source file, and qualified name.

A function of an importable module goes by module name. One from a script, a test file or `__main__` goes by the path of
its file, which the rank loads (under the name it has here, so that pickled objects find their classes).
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from minidist.errors import RunError, UserError

# multiprocessing's name for the main script of another process: its objects unpickle on both sides.
MAIN_ALIAS = "__mp_main__"

_files_being_imported: list[str] = []


class FunctionReference(NamedTuple):
    """The module and the qualified name of a function, by which another process can import it.

    file: the source file to load; None if `module` can be imported by name.
    """

    module: str
    qualname: str
    file: str | None


def make_function_reference(function: Callable) -> FunctionReference:
    """Return a reference by which another process can import `function`.

    Raises UserError for a lambda, a local function, or a function whose source is not in a file.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise UserError(
            f"{qualname or function!r} cannot be sent to ranks, which find functions by name: "
            "define it with `def` at the top level of a file, and pass what it needs as arguments"
        )
    try:
        file = os.path.abspath(inspect.getsourcefile(inspect.unwrap(function)))
    except TypeError:
        file = None
    if module != "__main__" and _is_importable(module, file):
        return FunctionReference(module, qualname, None)
    if file is None or not os.path.exists(file):
        raise UserError(f"{qualname} of {module} cannot be sent to ranks: its source is not in a file")
    if module == "__main__":
        sys.modules.setdefault(MAIN_ALIAS, sys.modules["__main__"])
    return FunctionReference(module, qualname, file)


def resolve_function(ref: FunctionReference) -> Callable:
    """Import the function that `ref` names, in the process of a rank, and return the function.

    Raises RunError if the module cannot be imported or has no such function.
    """
    source = ref.file or ref.module
    try:
        module = _load_file(ref.module, ref.file) if ref.file else importlib.import_module(ref.module)
    except BaseException as error:
        raise RunError(f"{source} cannot be imported on the ranks: {type(error).__name__}: {error}") from error
    target: Any = module
    for part in ref.qualname.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise RunError(f"{source} has no function {ref.qualname} when the ranks import it")
    return target


def _is_importable(name: str, file: str | None) -> bool:
    """Return whether a fresh interpreter with this sys.path would find this file under this module name.

    `importlib.util.find_spec` would answer from sys.modules, where pytest puts test files no other process can import.
    """
    path = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return file is None or (spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file))


def _find_spec(name: str, path):
    """Return the import specification of a module, from the finders alone; None if none knows it."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None:
            return spec
    return None


def _load_file(name: str, file: str):
    """Load a source file as module `name`, or as `__main__` under an alias; return the module."""
    name = MAIN_ALIAS if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ImportError(f"{file} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name == MAIN_ALIAS:
        sys.modules["__main__"] = module
    _files_being_imported.append(file)
    try:
        spec.loader.exec_module(module)
    finally:
        _files_being_imported.pop()
    return module


def check_no_import_by_a_rank() -> None:
    """Raise RunError in a rank that is importing its function's file: starting ranks there would never end."""
    if _files_being_imported:
        raise RunError(
            f"{_files_being_imported[-1]} starts ranks, and each rank imports the file: put what starts them under\n"
            'if __name__ == "__main__":'
        )
