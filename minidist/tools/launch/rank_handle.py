"""The launcher's handle of one rank process: its messages, output and stacks."""

import contextlib
import os
import pickle
import re
import signal
import socket
import time
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
_INTERNAL_FOLDERS = (
    os.path.join("minidist", "tools", ""),
    os.path.join("minidist", "comm", ""),
    "site-packages/torch/",
)


class RankHandle:
    """One rank process, seen from the launcher: this side's ends of its socket and pipes, and the data received from
    them.

    state: "running" until the rank reports its end: "value" (it returned), "error" (it raised) or "exit" (sys.exit).
    payload: the pickled return value, the `RankError` or the exit code of sys.exit, by state.
    exit_code: the exit code of the process, None while it lives. is_left_out: whether the process has died and the job
    continues without it.
    answers: the answers that the rank's `RankWorker` has sent and the launcher has not processed.
    hang_note: the reason for which the launcher has killed a hung rank, as the end of a sentence; "" if it has not.
    """

    def __init__(self, control: socket.socket, output_fd: int | None, stack_fd: int):
        self.control, self.output_fd, self.stack_fd = control, output_fd, stack_fd
        self.pid, self.hang_note = 0, ""
        self.state, self.payload, self.last_message_s = "running", None, 0.0
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
        """The file descriptors to read from: the rank's output, if it is captured, and its stack dumps."""
        return [fd for fd in (self.output_fd, self.stack_fd) if fd is not None]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.exit_code is not None

    def send_bootstrap(self, bootstrap: dict) -> None:
        """Send a new rank the function to run and its settings; block until the rank has read them."""
        self._send(bootstrap)
        self.control.setblocking(False)

    def allow_exit(self) -> None:
        """Tell a rank that has returned that it may end its process."""
        self.send_message("end")

    def send_message(self, message: Any) -> None:
        """Send an object to a rank that waits for one; block until the rank has read it."""
        self.control.setblocking(True)
        self._send(message)
        self.control.setblocking(False)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has died; the server will report the cause
            send_object(self.control, message)

    def read_messages(self) -> bool:
        """Process the messages that have arrived from the rank; return whether any had. Does not block."""
        if self._is_unreadable:
            return False
        try:
            data = self.control.recv(_READ_BYTES)
        except OSError:  # nothing has arrived, or the rank has died
            return False
        for frame in self._frames.feed(data):
            try:
                kind, payload = pickle.loads(frame)
            except Exception:  # the rank's code may have broken anything in its process
                self._is_unreadable, self.state, self.last_message_s = True, "exit", time.monotonic()
                return False
            if kind == "answer":
                self.answers.append(payload)
                continue
            self.state, self.payload, self.last_message_s = kind, payload, time.monotonic()
        return bool(data)

    def read_output(self) -> bool:
        """Append the output that has arrived from the rank to `output`; return whether any had. Does not block."""
        data = _read(self.output_fd)
        free_bytes = max(0, _MAX_OUTPUT_BYTES - len(self._output))
        self._output += data[:free_bytes]
        self._dropped_count += len(data) - len(data[:free_bytes])
        return bool(data)

    def read_stack_bytes(self) -> bool:
        """Append the stack dump that has arrived from the rank to `stack`; return whether any had. Does not block."""
        data = _read(self.stack_fd)
        self._stack += data
        return bool(data)

    def mark_ended(self, exit_code: int) -> None:
        """Record that the process has ended, after reading the data left in its socket and pipes."""
        while self.read_messages():
            pass
        while self.output_fd is not None and self.read_output():
            pass
        while self.read_stack_bytes():
            pass
        self.exit_code = exit_code

    @property
    def output(self) -> str:
        """The text that the rank has printed since `clear_output`, at most 16 MiB and a note on the rest."""
        note = f"\n[{self._dropped_count} more bytes were not kept]" if self._dropped_count else ""
        return self._output.decode(errors="replace") + note

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes of output that were discarded since `clear_output`, because at most 16 MiB are kept."""
        return self._dropped_count

    @property
    def output_bytes(self) -> int:
        """Number of bytes printed since `clear_output`, those beyond the limit included."""
        return len(self._output) + self._dropped_count

    def continue_output(self, former: "RankHandle") -> None:
        """Put the output of a former process of this rank, which this process replaces, before this rank's output."""
        self._output, self._dropped_count = former._output, former._dropped_count

    def clear_output(self) -> None:
        """Discard the output received so far, and reset the byte counts."""
        self._output.clear()
        self._dropped_count = 0

    @property
    def has_died(self) -> bool:
        """Whether the process ended too early: without returning or raising, or before all ranks had returned."""
        return self.state == "exit" or self.has_ended

    @property
    def death_cause(self) -> str:
        """How the process ended, as text, such as "died: killed by SIGKILL". Valid only if `has_died`."""
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

        The first line says which thread it is: the main thread if a thread without Python code crashed (gloo's own).
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
        """The message of an uncaught C++ exception, such as gloo's about mismatched sizes; "" if none was printed."""
        printed = self._output.decode(errors="replace").partition("terminate called after")
        return "\n".join(f"{printed[1]}{printed[2]}".splitlines()[:2])

    @property
    def error(self) -> RankError | None:
        """The exception that the rank raised; None if it raised none."""
        return self.payload if self.state == "error" else None

    def clear_stack(self) -> None:
        """Discard the stack dump, before another is requested."""
        self._stack.clear()

    @property
    def stack(self) -> str:
        """The last stack dump, innermost call first, without the launcher's own frames."""
        lines = self._stack.decode(errors="replace").splitlines()[1:]
        return "\n".join(filter(_is_user_frame, lines))

    @property
    def stack_is_complete(self) -> bool:
        """Whether the dump has arrived down to its last line, the code that started the process (`python -c`)."""
        return b'"<string>"' in self._stack

    def close(self) -> None:
        """Close this side's ends of the socket and the pipes."""
        self.control.close()
        for fd in self.fds:
            os.close(fd)


def find_innermost_line(stack: str) -> str | None:
    """Return the innermost line of a stack dump outside torch and the package's tools, as "file:line"; None if empty.

    stack: a text like `RankHandle.stack`.
    """
    lines = [f"{file}:{line}" for file, line in _DUMPED_FRAME.findall(stack)]
    outside = [line for line in lines if not any(folder in line for folder in _INTERNAL_FOLDERS)]
    return next(iter([*outside, *lines]), None)


def _is_user_frame(line: str) -> bool:
    return not any(name in line for name in (_LAUNCH_FOLDER, _CELL_RUNNER, '"<'))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""
