"""Side effects that no answer may have, watched in every test of every exercise.

An answer must leave alone what it shares with the rest of the process: the global random states, torch's settings, the
environment, threads and process groups. It must keep no data in its module between calls, and wait for every operation
that it launches. What it sends to other ranks must be counted, so it goes through a group of the check, not through the
rendezvous store or a backend that the answer makes itself. Nothing may follow from random states that happen to be
equal on all ranks; `exercises.interpreters` does the same for hashes and the order of sets.
"""

import ctypes
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from exercises.testing import Wrong

_COMPARED_CALLS = 100  # the outermost calls per test whose random states are compared: 0.05 ms each
_SHOWN = 60
_MT19937_BYTES = 4 * (624 + 1)
_TESTS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep
)  # the folder of the exercises' tests, in which no answer is
_STORE_WRITES = ("add", "append", "compare_set", "multi_set", "queue_push", "set")
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"  # when an optimizer's first step imports its compiler


class SideEffects:
    """Watches the answer's functions and classes during one test; `check()` raises Wrong for the first side effect.

    module: of the answer; its functions and the methods of its classes among `symbols` are wrapped. network: of the
    check, None if the answer makes its own process groups. may_seed: whether the exercise asks for code that sets the
    global random states. after_call: called when one of the functions and methods has returned to the test.

    found: the first side effect of a call, as a sentence; "" so far.
    """

    def __init__(
        self,
        module: ModuleType,
        symbols: Sequence[str],
        network: Any,
        may_seed: bool = False,
        after_call: Callable[[], None] = lambda: None,
    ):
        self._after_call = after_call
        self._module, self._network, self._may_seed = module, network, may_seed
        self._running, self._calls, self.found = "", 0, ""  # the name of the answer's function that runs now
        if network is not None:
            _CHANNELS.install()
            _CHANNELS.report = self._note_channel
        rank = dist.get_rank() if dist.is_initialized() else 0
        _seed_random_states(1000 + rank)
        for symbol in symbols:
            value = getattr(module, symbol, None)
            if isinstance(value, FunctionType):
                setattr(module, symbol, self._watch(value))
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for name, method in list(vars(value).items()):
                    if isinstance(method, FunctionType):
                        setattr(value, name, self._watch(method))
        self._variables, self._settings = _get_module_variables(module), _read_settings()

    def check(self) -> None:
        """Raise Wrong if the test has seen a side effect. Call it after the test has passed."""
        if self.found:
            raise Wrong("wrong", self.found)
        after = _get_module_variables(self._module)
        for name in sorted(after.keys() | self._variables.keys()):
            if after.get(name) != self._variables.get(name):
                what = f"your code keeps data in `{name}` between calls: the next call, or another object, would see it"
                raise Wrong("wrong", what)
        settings = _read_settings()
        for name, before in self._settings.items():
            if settings[name] != before:
                raise Wrong("wrong", f"your code changes {name}", _truncate(before), _truncate(settings[name]))
        for record in self._network.records if self._network is not None else ():
            if record.waited is None:
                peer = "" if record.peer is None else f" {'to' if record.name == 'send' else 'from'} rank {record.peer}"
                what = f"your code never waits for its {record.name}{peer} of shape {record.shape}"
                raise Wrong("wrong", f"{what}: until then its tensors must neither be read, changed nor freed")

    def _watch(self, function: Callable) -> Callable:
        """Return the function, wrapped: during each call from the test, side effects are looked for."""

        @functools.wraps(function)
        def watched(*args, **kwargs):
            if self._running:
                return function(*args, **kwargs)
            self._running, self._calls = function.__qualname__, self._calls + 1
            is_compared = not self._may_seed and self._calls <= _COMPARED_CALLS
            before, groups = _get_random_states() if is_compared else {}, _count_groups()
            try:
                result = function(*args, **kwargs)
                self._after_call()
                return result
            finally:
                self._running = ""
                if groups != _count_groups() and not self._may_seed:
                    # More telling than the backend and the store writes that come with a group.
                    self.found = f"{function.__qualname__} makes process groups and does not destroy them"
                for name, state in _get_random_states().items() if is_compared else ():
                    if state != before[name] and not self.found:
                        self.found = (
                            f"{function.__qualname__} changes the global random state of {name}: code that draws from "
                            "it afterwards gets other numbers. Draw from a generator of your own"
                        )

        return watched

    def _note_channel(self, what: str) -> None:
        """Note that the running call of the answer reaches other ranks where nothing counts its bytes.

        Without a network of the check, an answer may do so.
        """
        if self._running and self._network is not None and not self._may_seed:
            self.found = self.found or (
                f"{self._running} {what}: nothing counts what it sends there. Use the collectives and the group that "
                "you are given"
            )


class _UncountedChannels:
    """Reports each call of Python code, outside the tests, that writes to a store or makes a gloo backend.

    Torch's methods are replaced once in a process, since to replace and restore them takes longer than most calls of an
    answer. report: called with what the code does; a function of the latest `SideEffects`.
    """

    report: Callable[[str], None] | None = None

    def install(self) -> None:
        """Replace the methods, unless they are replaced already."""
        if self.report is not None:
            return
        for name in _STORE_WRITES:
            self._replace(dist.Store, name, f"writes to a store ({name})")
        self._replace(dist.ProcessGroupGloo, "__init__", "makes a process group or a gloo backend of its own")

    def _replace(self, owner: type, name: str, what: str) -> None:
        called = getattr(owner, name)

        @functools.wraps(called)
        def reported(*args, **kwargs):
            if not sys._getframe(1).f_code.co_filename.startswith(_TESTS) and self.report is not None:
                self.report(what)  # else the answer has called the test back
            return called(*args, **kwargs)

        setattr(owner, name, reported)


_CHANNELS = _UncountedChannels()


def _seed_random_states(seed: int) -> None:
    """Seed the global random states of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the stack for GPUs, which takes 6 ms
    random.seed(seed)
    np.random.seed(seed)


def _get_random_states() -> dict[str, Any]:
    """Return the global random states, by the name of the library."""
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "Python's random module": random.getstate()[1],
        "numpy": _get_numpy_state(),
    }


def _get_numpy_state() -> Any:
    """Return what changes when numpy's global random state does: get_state() takes longer than most calls of an answer.

    The memory of a Mersenne Twister, whose address numpy documents, is its 624 words and the position among them.
    """
    generator = np.random.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return generator, str(generator.state)
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _count_groups() -> int:
    """Return the number of process groups of this process."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def _read_settings() -> dict[str, Any]:
    """Return the settings of this process that an answer could change, by their names in the message."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "the environment variables": {name: text for name, text in os.environ.items() if name != _SET_BY_TORCH},
        "the running threads, which it must end": {thread.name for thread in threading.enumerate()},
    }


def _get_module_variables(module: ModuleType) -> dict[str, Any]:
    """Return what the module, its functions and its classes hold, by dotted name, in a form that can be compared."""
    held = {}
    for name, value in vars(module).items():
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        held[name] = _fingerprint(value)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        inner = getattr(value, "__wrapped__", value)
        if isinstance(inner, FunctionType):
            attributes = vars(inner) | vars(value)  # code of the answer that names itself sees the watched function
            held |= {f"{name}.{key}": _fingerprint(each) for key, each in attributes.items() if key != "__wrapped__"}
            defaults = (*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values())
            held[f"the default arguments of {name}"] = [_fingerprint(each) for each in defaults]
        elif isinstance(value, type):
            own = {key: each for key, each in vars(value).items() if not key.startswith(("__", "_abc_"))}
            held |= {f"{name}.{key}": _fingerprint(each) for key, each in own.items()}
    return held


def _fingerprint(value: Any) -> Any:
    """Return what changes when the value does: the content of plain values and tensors, the identity of the rest."""
    if isinstance(value, Tensor):
        return id(value), value._version, tuple(value.shape)
    if isinstance(value, dict):
        return "dict", [(str(key), _fingerprint(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, [_fingerprint(each) for each in value]
    if isinstance(value, int | float | str | bytes | bool | type(None)):
        return value
    return id(value)


def _truncate(value: Any) -> str:
    """Return the value as text, shortened."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
