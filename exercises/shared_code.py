"""Finds functions that an answer has replaced in the process that grades it.

A test compares what an answer returns with what torch, numpy and Python compute, in one process with the answer: one
that replaces `torch.Tensor.tolist`, `len` or `exercises.testing.expect` could make every comparison succeed. So this
module remembers the functions, classes and methods of the libraries, the package and the grader before the answer is
loaded, and compares by identity afterwards. The guard hears of a function whose body is replaced.

To look at an object is to count a reference to it, which copies a page of the memory that a rank shares with its
server: 4,000 pages for all functions, a third of the time of a short check. So only what has changed is looked at:
CPython gives a dictionary another version with every change (PEP 509), up to Python 3.13. Other Pythons look at
everything.

Not covered: objects that are no functions, such as the attributes of a group, and a replacement that is undone before
the next check. Complete protection needs tests outside the process of the answer.
"""

import builtins
import ctypes
import gc
import sys
from array import array
from builtins import all, id, len, map, next, range, zip  # noqa: UP029  an answer could replace the built-in functions
from collections.abc import Iterable, Mapping
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
# A dictionary begins with the head of every object and its length; then comes its version.
_VERSION_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


class _Version(ctypes.c_uint64):
    """The version at an address. Its `value` is that of ctypes, whatever an answer does to the class of ctypes."""

    value = ctypes.c_uint64.value


def _has_versions() -> bool:
    """Whether a dictionary of this Python has another version after every change, and only then."""
    if sys.implementation.name != "cpython":
        return False
    sample: dict[str, Any] = {"key": None}
    version = _Version.from_address(id(sample) + _VERSION_OFFSET)
    seen = [version.value]
    sample.get("key")
    seen.append(version.value)
    for value in (1, None):
        sample["key"] = value
        seen.append(version.value)
    del sample["key"]
    return seen[0] == seen[1] and len({*seen, version.value}) == 4


_HAS_VERSIONS = _has_versions()


def _version_address(live: Mapping) -> int:
    """Return where the version of a dictionary is, or of the dictionary behind a view of it."""
    return id(live if isinstance(live, dict) else gc.get_referents(live)[0]) + _VERSION_OFFSET


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

    _namespaces: list[_Namespace] = field(default_factory=list)
    _addresses: array = field(default_factory=lambda: array("Q"))  # of the version of each namespace's dictionary
    _versions: array = field(default_factory=lambda: array("Q"))  # of each namespace that is known to be right
    _known: set[int] = field(default_factory=set)  # the ids of the modules and classes
    _functions: dict[int, tuple[str, FunctionType]] = field(default_factory=dict)
    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _last_module: str = ""  # of those in `sys.modules`, which later ones follow
    _met_first: list[int] = field(default_factory=list)  # indices of namespaces

    def add_modules(self) -> None:
        """Watch the modules of `_LIBRARIES` and `_OWN` that are loaded and not yet watched."""
        for name in self._new_modules():
            module, is_own = sys.modules[name], name.split(".")[0] in _OWN
            if isinstance(module, ModuleType) and (is_own or name in _LIBRARIES):
                self._modules[name] = module
                if id(module) not in self._known:
                    self._watch_namespace(name, module, _BUILTINS, is_own)
        for each in _CLASSES:
            self._watch_class(f"{each.__module__}.{each.__qualname__}", each)

    def accept_changes(self) -> None:
        """Watch what has been loaded since, and take the present state for the right one."""
        self.add_modules()
        for index in self._changed(range(len(self._namespaces))):
            self._namespaces[index].accept_changes()
            self._versions[index] = _Version.from_address(self._addresses[index]).value

    def find_change(self, only_met_first: bool = False) -> str | None:
        """Return the dotted name of something that is not what it was; None if there is nothing.

        only_met_first: look only at the few places that a result meets first, in a few microseconds.
        """
        for index in self._changed(self._met_first if only_met_first else range(len(self._namespaces))):
            namespace = self._namespaces[index]
            version = _Version.from_address(self._addresses[index]).value
            if (name := namespace.find_change()) is not None:
                return f"{namespace.label}.{name}"
            self._versions[index] = version
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

    def _changed(self, indices: Iterable[int]) -> Iterable[int]:
        """Return those of these namespaces that may have changed since they were known to be right."""
        if not _HAS_VERSIONS:
            return indices
        addresses, versions, read = self._addresses, self._versions, _Version.from_address
        return [index for index in indices if read(addresses[index]).value != versions[index]]

    def _new_modules(self) -> list[str]:
        """Return the names in `sys.modules` that were added since the last call, or all if that is unknown."""
        last, names = self._last_module, []
        for name in reversed(sys.modules):
            if name == last:
                break
            names.append(name)
        self._last_module = names[0] if names else last
        return names[::-1]

    def _watch_namespace(self, label: str, owner: Any, inherited: frozenset[str], is_own: bool) -> None:
        """Watch the functions and classes of a module or class.

        label: its name. inherited: see `_Namespace`. is_own: whether to watch the classes in it, too.
        """
        namespace = _Namespace(label, vars(owner), inherited)
        if label in _MET_FIRST:
            self._met_first.append(len(self._namespaces))
        self._known.add(id(owner))
        self._namespaces.append(namespace)
        self._addresses.append(_version_address(namespace.live))
        self._versions.append(_Version.from_address(self._addresses[-1]).value)
        for name, value in namespace.code().items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, FunctionType):
                self._functions[id(function)] = f"{label}.{name}", function
            elif is_own and isinstance(value, type) and value.__module__.split(".")[0] in _OWN:
                self._watch_class(f"{value.__module__}.{value.__qualname__}", value)

    def _watch_class(self, label: str, owner: type) -> None:
        """Watch a class, unless it is watched already."""
        if id(owner) not in self._known:
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
