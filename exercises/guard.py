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
from exercises.catalogue import split_owner
from minidist.tools.pieces import SymbolReplacements

_NO_FILES = "an answer must not write files"
# Actions without an audit event: the end of the process, and files that torch writes in C++.
_UNSEEN = {
    "signal.signal": "an answer must not handle signals",
    "os._exit": "an answer must not end its process",
    "os.abort": "an answer must not end its process",
    "torch.save": _NO_FILES,
}
_PIECE_CALLED = "exercises.guard.piece_called"  # an audit event
_IMPORT = "<frozen importlib._bootstrap>"
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.kill", "os.killpg")
_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link", "os.symlink")
# Ways into the internals of Python, refused if a line of the answer itself takes them, under whatever name: libraries
# take them all the time. The source check names those that the source shows.
_INTERNALS = {
    *("sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "code.__new__", "exec", "compile", "function.__new__"),
    *("object.__getattr__", "object.__setattr__", "object.__delattr__", "sys.addaudithook"),
}
_SETS_ATTRIBUTE = ("object.__setattr__", "object.__delattr__")
_PACKAGE = os.path.dirname(os.path.abspath(minidist.__file__)) + os.sep
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForbiddenAction(BaseException):
    """Not an Exception, so that `except Exception` in the learner's code does not hide it."""


class Guard:
    """Installed once in a grading process; `caught` is the first forbidden action.

    answer: the learner's file; test_file: that of the tests, which may call the package's own piece. changed_function:
    as `SharedCode.changed_function`.
    """

    def __init__(self, answer: str, test_file: str, changed_function: Callable[[Any, str], str | None]):
        self.answer, self.caught = answer, None
        self._test_file, self._changed_function = test_file, changed_function
        self._secret: tuple[str, ...] = ()
        self._originals: dict[str, Callable] = {}
        self._off, self._is_auditing = False, False

    def install(self, pieces: Sequence[str], guards: Sequence[str], secret: Sequence[str]) -> None:
        """Install all guards. pieces: `module:symbol` of the package. guards: `module.name`. secret: paths."""
        for piece in pieces:
            self._guard_piece(piece)
        for name in guards:
            self._guard_name(name, "this exercise must be solved without it")
        for name, why in _UNSEEN.items():
            self._guard_name(name, why)
        self._secret = tuple(os.path.realpath(path) for path in secret)
        sys.addaudithook(self._on_audit_event)

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
        """Record the action and raise ForbiddenAction if the learner's file is on the call stack.

        what: the action. why: the advice in the message.
        """
        line = None if self._off else self.line()
        if line is not None:
            self.caught = self.caught or (f"line {line} {what}: {why}", line)
            raise ForbiddenAction(what)

    def _guard_name(self, name: str, why: str) -> None:
        """Replace a function, `module.name`, by one that is forbidden to the learner's file. why: the message."""
        module, (*classes, attribute) = split_owner(name)
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        original = getattr(owner, attribute)

        @functools.wraps(original, updated=())
        def guarded(*args, **kwargs):
            if why == _NO_FILES and not any(isinstance(each, str | os.PathLike) for each in (*args, *kwargs.values())):
                return original(*args, **kwargs)  # to memory, as the collectives of objects do
            self._tried(f"calls {name}", why)
            return original(*args, **kwargs)

        del guarded.__wrapped__  # would evade the guard
        setattr(owner, attribute, guarded)

    def _guard_piece(self, piece: str) -> None:
        """Replace a piece by an audit event: Python shows no reference from there to the guard, which hears of it."""
        call = f"result = []; __audit__({_PIECE_CALLED!r}, {{!r}}, args, kwargs, result); return result[0]"
        module, _, symbol = piece.partition(":")
        old = getattr(importlib.import_module(module), symbol)
        if isinstance(old, FunctionType):
            original = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
            original.__kwdefaults__ = old.__kwdefaults__
            source = f"def {symbol}(*args, **kwargs):\n    {call.format(piece)}\n"
            self._originals[piece] = original
        else:
            methods = [name for name, value in vars(old).items() if isinstance(value, FunctionType | staticmethod)]
            lines = [f"    def {name}(*args, **kwargs):\n        {call.format(piece)}" for name in methods]
            source = "\n".join([f"class {symbol}(*__bases__):", *lines])
            vars(sys.modules[module])["__bases__"] = old.__bases__
        vars(sys.modules[module])["__audit__"] = sys.audit
        SymbolReplacements().replace_symbol(piece, source)

    def _call_original_piece(self, piece: str, args: tuple, kwargs: dict, result: list) -> None:
        """Call the original of a piece for the package or the test; its only reference is in this guard."""
        name = piece.replace(":", ".")
        self._tried(f"calls {name}", "this is the code that you write here")
        # The grader needs no class: only an answer that inherits from it would use it.
        if piece not in self._originals or not self._is_trusted(sys._getframe(3).f_code):
            self.caught = self.caught or (f"your code uses {name}: this is the code that you write here", None)
            raise ForbiddenAction(name)
        result.append(self._originals[piece](*args, **kwargs))

    def _is_trusted(self, code: CodeType) -> bool:
        """Return whether code belongs to the package or the test."""
        return code.co_filename == self._test_file or code.co_filename.startswith(_PACKAGE)

    def _on_audit_event(self, event: str, args: tuple) -> None:
        """Check an audit event of Python: calls of pieces, changed attributes, opened files, processes, internals."""
        if event == _PIECE_CALLED:
            return self._call_original_piece(*args)
        if event in _SETS_ATTRIBUTE and not self._off:
            self._check_attribute_change(args[0], args[1])
        if event in _INTERNALS and not self._off and not self._is_auditing:
            self._is_auditing = True  # to look at a frame is an event of its own
            try:
                is_own = sys._getframe(1).f_code.co_filename == self.answer
            finally:
                self._is_auditing = False
            if is_own:
                self._tried(f"uses {event}", "an answer must not use the internals of Python or of the grader")
            return
        if self._off or not (event == "open" or event in _PROCESSES or event in _FILES) or self.line() is None:
            return
        if event in _FILES:
            self._tried(f"calls {event} on {args[0]}", "an answer must not change files")
        elif event in _PROCESSES:
            self._tried(f"starts or ends a process ({event})", "an answer must not start or end processes")
        elif not isinstance(args[0], int):
            self._check_open(os.fsdecode(args[0]), args[2])

    def _check_attribute_change(self, target: Any, attribute: str) -> None:
        """Refuse another body for a function that the tests use, in any thread: the grader sets none during a test."""
        changed = self._changed_function(target, attribute)
        if changed is not None:
            self.caught = self.caught or (changed, self.line())
            raise ForbiddenAction(changed)

    def _check_open(self, path: str, flags: int) -> None:
        """Refuse to open a file for writing, a secret file, or a folder. flags: of `os.open`."""
        real = os.path.realpath(path)
        if flags & _WRITES:
            if real != os.devnull:
                self._tried(f"opens {path} for writing", _NO_FILES)
        elif any(real == secret or real.startswith(secret + os.sep) for secret in self._secret):
            if not self._is_reading_source_lines():
                self._tried(f"reads {Path(path).name}", "write the answer yourself")
        elif os.path.isdir(real):  # would allow relative names
            self._tried(f"opens the folder {path}", "an answer must not open folders")

    def _is_reading_source_lines(self) -> bool:
        """Return whether a library reads source lines to show a call stack.

        logging, warnings and torch.manual_seed do.
        """
        frame, file = sys._getframe(1), ""
        while frame is not None and frame.f_code.co_filename != self.answer:
            caller_of, file = file, frame.f_code.co_filename
            if caller_of == linecache.__file__ != file:
                return True
            frame = frame.f_back
        return False
