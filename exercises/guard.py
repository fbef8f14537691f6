"""Prevents forbidden actions of a learner's code while it is graded, and names the line that tried one.

It guards the package's own piece, ready-made equivalents, files outside the exercise and other processes. An action is
forbidden if the learner's file is on the call stack; the package and the tests may do all of this. The piece is guarded
more strictly: its immediate caller must be the package or the test.
"""

import functools
import importlib
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import minidist
from minidist.tools.pieces import SymbolReplacements

_NO_FILES = "an answer must not write files"
# Actions without an audit event: the end of the process, and files that torch writes in C++.
_UNSEEN = {
    "os._exit": "an answer must not end its process",
    "os.abort": "an answer must not end its process",
    "torch.save": _NO_FILES,
}
_IMPORT = "<frozen importlib._bootstrap>"
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.kill", "os.killpg")
_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link", "os.symlink")
_PACKAGE = os.path.dirname(os.path.abspath(minidist.__file__)) + os.sep
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForbiddenAction(BaseException):
    """Not an Exception, so that `except Exception` in the learner's code does not hide it."""


class Guard:
    """Installed once in a grading process; `caught` is the first forbidden action.

    answer: the learner's file; test_file: that of the tests, which may call the package's own piece.
    """

    def __init__(self, answer: str, test_file: str):
        self.answer, self.caught = answer, None
        self._test_file = test_file
        self._secret: tuple[str, ...] = ()
        self._off = False

    def install(self, pieces: Sequence[str], guards: Sequence[str], secret: Sequence[str]) -> None:
        """Install all guards. pieces: `module:symbol` of the package. guards: `module.name`. secret: paths."""
        originals: dict[str, Callable] = {}
        for piece in pieces:
            self._guard_piece(piece, originals)
        for name in guards:
            self._guard_name(name, "this exercise must be solved without it")
        for name, why in _UNSEEN.items():
            self._guard_name(name, why)
        self._secret = tuple(os.path.realpath(path) for path in secret)
        sys.addaudithook(self._audit)

    def stop(self) -> None:
        """Stop guarding: the grader takes over."""
        self._off = True

    def line(self) -> int | None:
        """Return the innermost line of the learner's file on the call stack; None inside an import by that line."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in (self.answer, _IMPORT):
            frame = frame.f_back
        return frame.f_lineno if frame is not None and frame.f_code.co_filename == self.answer else None

    def _tried(self, what: str, why: str) -> None:
        line = None if self._off else self.line()
        if line is not None:
            self.caught = self.caught or (f"line {line} {what}: {why}", line)
            raise ForbiddenAction(what)

    def _guard_name(self, name: str, why: str) -> None:
        owner, attribute = _owner(name)
        original = getattr(owner, attribute)

        @functools.wraps(original, updated=())
        def guarded(*args, **kwargs):
            if why == _NO_FILES and not any(isinstance(each, str | os.PathLike) for each in (*args, *kwargs.values())):
                return original(*args, **kwargs)  # to memory, as the collectives of objects do
            self._tried(f"calls {name}", why)
            return original(*args, **kwargs)

        del guarded.__wrapped__  # would evade the guard
        setattr(owner, attribute, guarded)

    def _guard_piece(self, piece: str, originals: dict[str, Callable]) -> None:
        module, _, symbol = piece.partition(":")
        old = getattr(importlib.import_module(module), symbol)
        if isinstance(old, FunctionType):
            original = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
            original.__kwdefaults__ = old.__kwdefaults__
            source = f"def {symbol}(*args, **kwargs):\n    return __guarded__({piece!r}, args, kwargs)\n"
            originals[piece] = original
        else:
            methods = [name for name, value in vars(old).items() if isinstance(value, FunctionType | staticmethod)]
            lines = [
                f"    def {name}(*args, **kwargs): return __guarded__({piece!r}, args, kwargs)" for name in methods
            ]
            source = "\n".join([f"class {symbol}(*__bases__):", *lines])
            vars(sys.modules[module])["__bases__"] = old.__bases__
        vars(sys.modules[module])["__guarded__"] = self._caller(originals)
        SymbolReplacements().replace_symbol(piece, source)

    def _caller(self, originals: dict[str, Callable]) -> Callable:
        """Make the replacement of the pieces: a closure, so that their module has no reference to the guard."""

        def guarded(piece: str, args: tuple, kwargs: dict) -> Any:
            name = piece.replace(":", ".")
            self._tried(f"calls {name}", "this is the code that you write here")
            # The grader needs no class: only an answer that inherits from it would use it.
            if piece not in originals or not self._ours(sys._getframe(2).f_code):
                self.caught = self.caught or (f"your code uses {name}: this is the code that you write here", None)
                raise ForbiddenAction(name)
            return originals[piece](*args, **kwargs)

        return guarded

    def _ours(self, code: CodeType) -> bool:
        """Whether code belongs to the package or the test."""
        return code.co_filename == self._test_file or code.co_filename.startswith(_PACKAGE)

    def _audit(self, event: str, args: tuple) -> None:
        if self._off or not (event == "open" or event in _PROCESSES or event in _FILES) or self.line() is None:
            return
        if event in _FILES:
            self._tried(f"calls {event} on {args[0]}", "an answer must not change files")
        elif event in _PROCESSES:
            self._tried(f"starts or ends a process ({event})", "an answer must not start or end processes")
        elif not isinstance(args[0], int):
            self._opens(os.fsdecode(args[0]), args[2])

    def _opens(self, path: str, flags: int) -> None:
        real = os.path.realpath(path)
        if flags & _WRITES:
            if real != os.devnull:
                self._tried(f"opens {path} for writing", _NO_FILES)
        elif any(real == secret or real.startswith(secret + os.sep) for secret in self._secret):
            if not self._reads_source_lines():
                self._tried(f"reads {Path(path).name}", "write the answer yourself")
        elif os.path.isdir(real):  # would allow relative names
            self._tried(f"opens the folder {path}", "an answer must not open folders")

    def _reads_source_lines(self) -> bool:
        """Whether a library reads source lines to show a call stack, as logging, warnings and torch.manual_seed do."""
        frame, file = sys._getframe(1), ""
        while frame is not None and frame.f_code.co_filename != self.answer:
            caller_of, file = file, frame.f_code.co_filename
            if caller_of == linecache.__file__ != file:
                return True
            frame = frame.f_back
        return False


def _owner(name: str) -> tuple[Any, str]:
    """Split a dotted name into its owner (module or class) and its last part."""
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
