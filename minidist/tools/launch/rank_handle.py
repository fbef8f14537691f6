"""The launcher's handle of one rank process: its messages, output and stacks."""

import contextlib
import os
import pickle
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

from minidist.tools.launch.failure import RankError
from minidist.tools.launch.protocol import FrameParser, send_object

_READ_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 16 << 20
_LAUNCH_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CELL_RUNNER = os.path.join("notebook", "rank_session.py")
# A thread in a dump of faulthandler: a head line, then its frames.
_DUMPED_THREAD = re.compile(r"^(Current thread|Thread) 0x.*\n((?:  .*\n?)*)", re.MULTILINE)

_DUMPED_FRAME = re.compile(r'File "(.+)", line (\d+) in ')
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep  # site-packages is in it, too
_INTERNAL_FOLDERS = (
    os.path.join("minidist", "tools", ""),
    os.path.join("minidist", "comm", ""),
    "site-packages/torch/",
)


class RankHandle:
    """One rank process, seen from the launcher: its socket and pipes, and the data received through them.

    control: the socket for messages. output_fd: the pipe with stdout and stderr, None if the output is not captured.
    stack_fd: the pipe with dumps of the Python stack.
    state: "running" until the rank reports its end, then "value" (it returned), "error" (it raised) or "exit"
    (sys.exit). payload: by state, the pickled return value, the `RankError` or the exit code of sys.exit. exit_code:
    the exit code of the process, None while it lives. is_left_out: whether the process has died and the job continues
    without it. answers: the answers to requests (see `RankWorker`) that have arrived and are not yet processed.
    hang_note: why the launcher has killed a hung rank, as the end of a sentence; "" if it has not.
    load_message: unpickles the rank's messages.
    """

    def __init__(
        self,
        control: socket.socket,
        output_fd: int | None,
        stack_fd: int,
        load_message: Callable[[bytes], Any] = pickle.loads,
    ):
        self._load_message = load_message
        self.control, self.output_fd, self.stack_fd = control, output_fd, stack_fd
        self.pid, self.hang_note = 0, ""
        self.state, self.payload = "running", None
        self.exit_code: int | None = None
        self.is_left_out = False
        self.answers: list[Any] = []
        self._is_unreadable = False  # it sent bytes that cannot be unpickled
        self._frames, self._output, self._dropped_count, self._stack = FrameParser(), bytearray(), 0, bytearray()
        control.setblocking(True)
        for fd in self.fds:
            os.set_blocking(fd, False)

    @property
    def fds(self) -> list[int]:
        """The file descriptors to read from: the rank's output, if captured, and its stack dumps."""
        return [fd for fd in (self.output_fd, self.stack_fd) if fd is not None]

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process has ended."""
        return self.exit_code is not None

    def send_bootstrap(self, bootstrap: dict) -> None:
        """Send a new rank the function to run and its settings, once, before any other message."""
        self._send(bootstrap)
        self.control.setblocking(False)

    def allow_exit(self) -> None:
        """Tell the rank, which has returned from its function, that its process may end."""
        self.send_message("end")

    def send_message(self, message: Any) -> None:
        """Send a picklable object to the rank. Blocks if the socket is full; does nothing if the rank has died."""
        self.control.setblocking(True)
        self._send(message)
        self.control.setblocking(False)

    def _send(self, message: Any) -> None:
        """Send an object to the rank. Does nothing if it has died: the server reports the cause."""
        with contextlib.suppress(OSError):  # it has died; the server will report the cause
            send_object(self.control, message)

    def read_messages(self) -> bool:
        """Read the messages that have arrived from the rank into `state`, `payload` and `answers`. Does not block.

        Returns False if nothing has arrived.
        """
        if self._is_unreadable:
            return False
        try:
            data = self.control.recv(_READ_BYTES)
        except OSError:  # nothing has arrived, or the rank has died
            return False
        for frame in self._frames.feed(data):
            try:
                kind, payload = self._load_message(frame)
            except Exception:  # the rank's code may have broken anything in its process
                self._is_unreadable, self.state = True, "exit"
                return False
            if kind == "answer":
                self.answers.append(payload)
                continue
            self.state, self.payload = kind, payload
        return bool(data)

    def read_output(self) -> bool:
        """Append the output that has arrived from the rank to `output`. Does not block; returns False if none has."""
        data = _read_available(self.output_fd)
        free_bytes = max(0, _MAX_OUTPUT_BYTES - len(self._output))
        self._output += data[:free_bytes]
        self._dropped_count += len(data) - len(data[:free_bytes])
        return bool(data)

    def read_stack_bytes(self) -> bool:
        """Append the stack dump that has arrived from the rank to `stack`. Does not block; False if nothing has."""
        data = _read_available(self.stack_fd)
        self._stack += data
        return bool(data)

    def drain_and_mark_ended(self, exit_code: int) -> None:
        """Read the data left in the rank's socket and pipes, then record that the process has ended."""
        while self.read_messages():
            pass
        while self.output_fd is not None and self.read_output():
            pass
        while self.read_stack_bytes():
            pass
        self.exit_code = exit_code

    @property
    def output(self) -> str:
        """The stdout and stderr of the rank since `clear_output`: the first 16 MiB, and a note on what was dropped."""
        note = f"\n[{self._dropped_count} more bytes were not kept]" if self._dropped_count else ""
        return self._output.decode(errors="replace") + note

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes of output since `clear_output` that were discarded: only the first 16 MiB are kept."""
        return self._dropped_count

    @property
    def output_bytes(self) -> int:
        """Number of bytes of output since `clear_output`, with the discarded bytes."""
        return len(self._output) + self._dropped_count

    def take_over_output_of(self, former: "RankHandle") -> None:
        """Begin this rank's output with that of the dead process `former`, which this process replaces."""
        self._output, self._dropped_count = former._output, former._dropped_count

    def clear_output(self) -> None:
        """Discard the output received so far and set `output_bytes` and `dropped_bytes` to 0."""
        self._output.clear()
        self._dropped_count = 0

    @property
    def has_died(self) -> bool:
        """Whether the rank's process ended too early: without a result, or before all ranks had returned."""
        return self.state == "exit" or self.has_ended

    @property
    def death_cause(self) -> str:
        """How the rank's process ended, such as "died: killed by SIGKILL". Valid only if `has_died`."""
        if self._is_unreadable:
            return "died: its messages cannot be unpickled, so its code must have changed Python's own functions"
        exit_code = self.payload if self.state == "exit" else self.exit_code
        after_return = " after it returned" if self.state == "value" else ""
        if exit_code < 0:
            return f"died{after_return}: killed by {signal.Signals(-exit_code).name}{self.hang_note}"
        return f"died{after_return}: exited with code {exit_code}" + (
            "" if exit_code or after_return else " before it returned"
        )

    @property
    def crash_stack(self) -> str:
        """The Python stack at a fatal signal such as SIGSEGV, innermost call first; "" if there was none.

        If a thread without Python code crashed (one of gloo's, for instance), this is the stack of the main thread; the
        first line says so.
        """
        dump = self._stack.decode(errors="replace").partition("Fatal Python error")[2]
        sections = dict(_DUMPED_THREAD.findall(dump))  # the main thread is last
        if not sections:
            return ""
        crashed_in_python = "Current thread" in sections
        head = "Python stack" if crashed_in_python else "a thread without Python code crashed; stack of the main thread"
        frames = sections["Current thread" if crashed_in_python else "Thread"].splitlines()
        return "\n".join([f"{head}, innermost call first:", *filter(_is_user_frame, frames)])

    @property
    def abort_message(self) -> str:
        """The message of an uncaught C++ exception, such as gloo's about mismatched sizes; "" if there was none."""
        printed = self._output.decode(errors="replace").partition("terminate called after")
        return "\n".join(f"{printed[1]}{printed[2]}".splitlines()[:2])

    @property
    def error(self) -> RankError | None:
        """The exception that the rank raised; None if it raised none."""
        return self.payload if self.state == "error" else None

    def clear_stack(self) -> None:
        """Discard the stack dump received so far. Call this before requesting another."""
        self._stack.clear()

    @property
    def stack(self) -> str:
        """The Python stack that the rank sent last, as text, innermost call first, without the launcher's frames."""
        lines = self._stack.decode(errors="replace").splitlines()[1:]
        return "\n".join(filter(_is_user_frame, lines))

    @property
    def is_stack_complete(self) -> bool:
        """Whether the whole stack dump has arrived: its last line is `python -c`, which started the process."""
        return b'"<string>"' in self._stack

    def close(self) -> None:
        """Close this process's ends of the socket and the pipes to the rank."""
        self.control.close()
        for fd in self.fds:
            os.close(fd)


def find_innermost_line(stack: str) -> str | None:
    """Return the innermost "file:line" of a stack outside torch, Python's own library, `minidist.comm` and tools.

    stack: text of a stack dump, innermost call first. If all its lines are in these packages, returns the innermost
    line; None for an empty stack.
    """
    lines = [f"{file}:{line}" for file, line in _DUMPED_FRAME.findall(stack)]
    outside = [line for line in lines if not _is_internal(line)]
    return next(iter([*outside, *lines]), None)


def _is_internal(line: str) -> bool:
    """Return whether a "file:line" is in torch, Python's own library, `minidist.comm` or `minidist.tools`."""
    if any(folder in line for folder in _INTERNAL_FOLDERS):
        return True
    return line.startswith(_STANDARD_LIBRARY) and "-packages" not in line.removeprefix(_STANDARD_LIBRARY)


def _is_user_frame(line: str) -> bool:
    """Return whether a line of a stack dump belongs to the user's code, not to the launcher."""
    return not any(name in line for name in (_LAUNCH_FOLDER, _CELL_RUNNER, '"<'))


def _read_available(fd: int) -> bytes:
    """Return the bytes that have arrived in a pipe; b"" if there are none. Does not block."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""
