"""What a learner's code may not do while it is judged, and which line of it tried.

Guarded are the package's own piece, ready-made equivalents, files outside the exercise and other processes. A guard
looks for the learner's file on the call stack: the package and the tests may do all of this.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from minidist.pieces import Pieces

# What no audit event tells of: the end of the process, and files that torch writes in C++.
_UNSEEN = {
    "os._exit": "an answer must not end its process",
    "os.abort": "an answer must not end its process",
    "torch.save": "an answer writes no files",
}
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.kill", "os.killpg")
_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link", "os.symlink")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(BaseException):
    """Not an Exception, so that `except Exception` in the learner's code does not hide it."""


class Guard:
    """Installed once in a process that judges; `caught` is the first thing that was tried."""

    def __init__(self, answer: str):
        self.answer, self.caught = answer, None
        self._originals: dict[str, Callable] = {}
        self._secret: tuple[str, ...] = ()
        self._off = False

    def install(self, pieces: Sequence[str], guards: Sequence[str], secret: Sequence[str]) -> None:
        """pieces: `module:symbol` of the package; guards: `module.name`; secret: files and folders not to be read."""
        for piece in pieces:
            self._guard_piece(piece)
        for name in guards:
            self._guard_name(name, "the exercise is to do without it")
        for name, why in _UNSEEN.items():
            self._guard_name(name, why)
        self._secret = tuple(secret)
        sys.addaudithook(self._audit)

    def stop(self) -> None:
        """The judge takes over: nothing is guarded any more."""
        self._off = True

    def line(self) -> int | None:
        """The innermost line of the learner's file that is being executed."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.answer:
            frame = frame.f_back
        return frame and frame.f_lineno

    def _tried(self, what: str, why: str) -> None:
        line = None if self._off else self.line()
        if line is not None:
            self.caught = self.caught or (f"line {line} {what}: {why}", line)
            raise Forbidden(what)

    def _guard_name(self, name: str, why: str) -> None:
        owner, attribute = _owner(name)
        original = getattr(owner, attribute)

        @functools.wraps(original, updated=())
        def guarded(*args, **kwargs):
            self._tried(f"calls {name}", why)
            return original(*args, **kwargs)

        setattr(owner, attribute, guarded)

    def _guard_piece(self, piece: str) -> None:
        module, _, symbol = piece.partition(":")
        old = getattr(importlib.import_module(module), symbol)
        if isinstance(old, FunctionType):
            original = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
            original.__kwdefaults__ = old.__kwdefaults__
            source = f"def {symbol}(*args, **kwargs):\n    return __guarded__({piece!r}, args, kwargs)\n"
            self._originals[piece] = original
        else:
            methods = [name for name, value in vars(old).items() if isinstance(value, FunctionType)]
            lines = [
                f"    def {name}(*args, **kwargs): return __guarded__({piece!r}, args, kwargs)" for name in methods
            ]
            source = "\n".join([f"class {symbol}:", *lines])
        vars(sys.modules[module])["__guarded__"] = self._piece_called
        Pieces().replace(piece, source)

    def _piece_called(self, piece: str, args: tuple, kwargs: dict) -> Any:
        name = piece.replace(":", ".")
        self._tried(f"calls {name}", "that is what you are to write")
        if piece not in self._originals:  # a class is not needed by the judge: whoever uses it inherits from it
            self.caught = self.caught or (f"your code uses {name}: that is what you are to write", None)
            raise Forbidden(name)
        return self._originals[piece](*args, **kwargs)

    def _audit(self, event: str, args: tuple) -> None:
        if self._off or not (event == "open" or event in _PROCESSES or event in _FILES):
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, int):
                return
            if flags & _WRITES:
                self._tried(f"opens {os.fsdecode(path)} for writing", "an answer writes no files")
            elif os.path.abspath(os.fsdecode(path)).startswith(self._secret):
                self._tried(f"reads {Path(os.fsdecode(path)).name}", "write the answer yourself")
        elif event in _FILES:
            self._tried(f"calls {event} on {args[0]}", "an answer touches no files")
        else:
            self._tried(f"starts or ends a process ({event})", "an answer has no business with processes")


def _owner(name: str) -> tuple[Any, str]:
    """The module or class that holds the last part of a dotted name, and that part."""
    *path, attribute = name.split(".")
    for end in range(len(path), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(path[:end]))
        except ModuleNotFoundError:
            continue
        for part in path[end:]:
            owner = getattr(owner, part)
        return owner, attribute
    raise ModuleNotFoundError(f"no module holds {name}")
