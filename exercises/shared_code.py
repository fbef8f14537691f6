"""Finds functions that an answer has replaced in the process that grades it.

A test compares what an answer returns with what torch, numpy and Python compute, in one process with the answer: one
that replaces `torch.Tensor.tolist`, `len` or `exercises.testing.expect` could make every comparison succeed. So this
module remembers the functions, classes and methods of the libraries, the package and the grader before the answer is
loaded, and compares by identity afterwards. The guard hears of a function whose body is replaced.

Not covered: objects that are no functions, such as the attributes of a group, and a replacement that is undone before
the next check. Complete protection needs tests outside the process of the answer.
"""

import builtins
import sys
from builtins import all, len, map, next, zip  # noqa: UP029  an answer could replace the built-in functions
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch

# Watched with everything in them; of other modules, the functions and classes alone.
_CLASSES = (torch.Tensor, torch._C.TensorBase, torch.nn.Parameter, torch.nn.Module, torch.autograd.Function)
_LIBRARIES = (
    *("builtins", "math", "cmath", "random", "copy", "itertools", "functools", "operator", "contextlib", "collections"),
    *(
        "dataclasses",
        "fractions",
        "statistics",
        "hashlib",
        "json",
        "pickle",
        "struct",
        "io",
        "os",
        "posix",
        "sys",
        "gc",
    ),
    *("threading", "time", "traceback", "warnings", "weakref", "inspect", "types", "typing", "signal"),
    *("socket", "tempfile", "shutil", "pathlib", "subprocess", "unittest.mock", "linecache", "faulthandler"),
    *("torch", "torch._C._nn", "torch.nn.functional", "torch.functional", "torch._tensor", "torch.autograd"),
    *("torch.autograd.graph", "torch.autograd.profiler", "torch.testing", "torch.testing._comparison", "torch.linalg"),
    *("torch.distributed", "torch.distributed.distributed_c10d", "torch.overrides", "torch.utils._pytree"),
    *("torch.utils.flop_counter", "torch.nn", "torch.nn.init", "torch.optim", "torch.random", "torch.serialization"),
    *("numpy", "numpy.linalg", "numpy.random", "numpy.testing", "numpy._core.numeric", "numpy._core.fromnumeric"),
)
# What the answer's results meet first, checked after each of its calls; the rest once per test.
_MET_FIRST = (
    "builtins",
    "torch",
    "torch.Tensor",
    "torch._C.TensorBase",
    "numpy",
    "exercise_tests",
    "exercises.testing",
)
# By init_process_group, by set_default_dtype, and by the import of torch._dynamo.
_SET_BY_TORCH = {("sys", "excepthook"), ("torch", "Storage"), ("torch", "manual_seed")}
_OWN = ("exercises", "exercise_tests", "minidist")  # packages whose classes are watched with their methods
_BUILTINS = frozenset(vars(builtins))
_BODY = ("__code__", "__defaults__", "__kwdefaults__")


class _Namespace:
    """The functions and classes in a module or class, as they were.

    label: its name. live: its names now. inherited: names that a new entry would hide: those of base classes, or
    Python's built-in functions.
    """

    def __init__(self, label: str, live: Mapping[str, Any], inherited: frozenset[str]):
        self.label, self.live, self._inherited = label, live, inherited
        self.accept_changes()

    def accept_changes(self) -> None:
        """Take the present state for the right one."""
        known = {
            name: value
            for name, value in self.live.items()
            if _is_code(value) and (self.label, name) not in _SET_BY_TORCH
        }
        self._names, self.values, self._size = list(known), list(known.values()), len(self.live)

    def code(self) -> dict[str, Any]:
        """Return the functions and classes by name, as they were."""
        return dict(zip(self._names, self.values, strict=True))

    def find_change(self) -> str | None:
        """Return a name that is not what it was; None if there is none."""
        if not all(map(is_, map(self.live.get, self._names), self.values)):
            return next(name for name, value in self.code().items() if self.live.get(name) is not value)
        if len(self.live) == self._size:
            return None
        hiding = (self.live.keys() & self._inherited) - set(self._names)
        return next((name for name in sorted(hiding) if _is_code(self.live[name])), None)


@dataclass
class SharedCode:
    """What an answer shares with its tests. Make it before the answer is loaded; `find_change` names what has changed.

    A rank begins with a copy made by its server of what all exercises share, so `accept_changes` must be called once
    the process is prepared and its tests are loaded.
    """

    _namespaces: dict[int, _Namespace] = field(default_factory=dict)  # by the id of the module or class
    _functions: dict[int, tuple[str, FunctionType]] = field(default_factory=dict)
    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _met_first: list[_Namespace] = field(default_factory=list)

    def add_modules(self) -> None:
        """Watch the modules of `_LIBRARIES` and `_OWN` that are loaded and not yet watched."""
        for name, module in list(sys.modules.items()):
            is_own = name.split(".")[0] in _OWN
            if isinstance(module, ModuleType) and (is_own or name in _LIBRARIES):
                self._modules[name] = module
            if isinstance(module, ModuleType) and (is_own or name in _LIBRARIES) and id(module) not in self._namespaces:
                self._watch_namespace(name, module, _BUILTINS, is_own)
        for each in _CLASSES:
            self._watch_class(f"{each.__module__}.{each.__qualname__}", each)

    def accept_changes(self) -> None:
        """Watch what has been loaded since, and take the present state for the right one."""
        self.add_modules()
        for namespace in self._namespaces.values():
            if namespace.find_change() is not None:
                namespace.accept_changes()
        self._met_first = [each for each in self._namespaces.values() if each.label in _MET_FIRST]

    def find_change(self, only_met_first: bool = False) -> str | None:
        """Return the dotted name of something that is not what it was; None if there is nothing.

        only_met_first: look only at the few places that a result meets first, in a tenth of a millisecond.
        """
        for namespace in self._met_first if only_met_first else self._namespaces.values():
            if (name := namespace.find_change()) is not None:
                return f"{namespace.label}.{name}"
        if only_met_first:
            return None
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"the module {name}"
        return None

    def changed_function(self, target: Any, attribute: str) -> str | None:
        """Return the message if a new value of this attribute of `target` changes the body of a watched function.

        The guard asks when Python tells it of such a change, since reading every body would cost far more: each read is
        an audit event too, and copies a page of the memory that a rank shares with its server.
        """
        label, function = self._functions.get(id(target), ("", None))
        return describe_change(label) if function is target and attribute in _BODY else None

    def _watch_namespace(self, label: str, owner: Any, inherited: frozenset[str], is_own: bool) -> None:
        """Watch the functions and classes of a module or class.

        label: its name. inherited: see `_Namespace`. is_own: whether to watch the classes in it, too.
        """
        namespace = self._namespaces[id(owner)] = _Namespace(label, vars(owner), inherited)
        for name, value in namespace.code().items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, FunctionType):
                self._functions[id(function)] = f"{label}.{name}", function
            elif is_own and isinstance(value, type) and value.__module__.split(".")[0] in _OWN:
                self._watch_class(f"{value.__module__}.{value.__qualname__}", value)

    def _watch_class(self, label: str, owner: type) -> None:
        """Watch a class, unless it is watched already."""
        if id(owner) not in self._namespaces:
            inherited = frozenset(name for base in owner.__mro__[1:] for name in vars(base))
            self._watch_namespace(label, owner, inherited, True)


def _is_code(value: Any) -> bool:
    """Return whether the value is a function, class, method or property."""
    return callable(value) or issubclass(type(value), (staticmethod, classmethod, property))


def describe_change(name: str) -> str:
    """Return the message about a function that an answer has replaced."""
    return f"your code replaces {name}: an answer must leave alone what other code uses"


def make_shared_code() -> SharedCode:
    """Return a `SharedCode` of what is loaded now. In a rank, a server's copy costs nothing."""
    shared = SharedCode()
    shared.add_modules()
    return shared


# Made where this module is imported first: in the rank server, before it forks the ranks.
SHARED_CODE = make_shared_code()
