"""The client's view of one rank: its messages, output and stacks."""

import contextlib
import os
import pickle
import signal
import socket
import time
from typing import Any

from minidist.tools.launch.failure import RankError
from minidist.tools.launch.protocol import FrameParser, send_object

_READ_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 16 << 20
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))


class RemoteRank:
    """The client's ends of the sockets and pipes of one rank, and everything received from them.

    state: "running", then the kind of the rank's last message, "value", "error" or "exit", whose content is `payload`.
    code: exit code of the process, None while it lives. answers: of a live rank.
    """

    def __init__(self, control: socket.socket, output_fd: int | None, stack_fd: int):
        self.control, self.output_fd, self.stack_fd = control, output_fd, stack_fd
        self.pid = 0
        self.state, self.payload, self.last_message_s = "running", None, 0.0
        self.code: int | None = None
        self.answers: list[Any] = []
        self._unreadable = False  # it sent bytes that cannot be unpickled
        self._frames, self._output, self._dropped, self._stack = FrameParser(), bytearray(), 0, bytearray()
        control.setblocking(True)
        for fd in self.fds:
            os.set_blocking(fd, False)

    @property
    def fds(self) -> list[int]:
        """The pipes to read: output, if it is captured, and stacks."""
        return [fd for fd in (self.output_fd, self.stack_fd) if fd is not None]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.code is not None

    def start(self, bootstrap: dict) -> None:
        """Send the rank its job; block until it has read all of it."""
        self._send(bootstrap)
        self.control.setblocking(False)

    def allow_exit(self) -> None:
        """Let a rank that has returned end its process."""
        self.send("end")

    def send(self, message: Any) -> None:
        """Send a message to a rank that waits for one."""
        self.control.setblocking(True)
        self._send(message)
        self.control.setblocking(False)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it died, and the server will say how
            send_object(self.control, message)

    def read_control(self) -> bool:
        """Read the rank's messages; return False when no more will come, or none that can be unpickled."""
        while not self._unreadable:
            try:
                data = self.control.recv(_READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            for frame in self._frames.feed(data):
                try:
                    kind, payload = pickle.loads(frame)
                except Exception:  # the rank's code may have broken anything in its process
                    self._unreadable, self.state, self.last_message_s = True, "exit", time.monotonic()
                    return False
                if kind == "answer":
                    self.answers.append(payload)
                    continue
                self.state, self.payload, self.last_message_s = kind, payload, time.monotonic()
        return False

    def read_output(self) -> bool:
        """Read available output; return whether there was any."""
        data = _read(self.output_fd)
        room = max(0, _MAX_OUTPUT_BYTES - len(self._output))
        self._output += data[:room]
        self._dropped += len(data) - len(data[:room])
        return bool(data)

    def read_stack(self) -> bool:
        """Read the available part of a stack dump; return whether there was any."""
        data = _read(self.stack_fd)
        self._stack += data
        return bool(data)

    def mark_ended(self, code: int) -> None:
        """Record that the process has ended, after reading what is left in its sockets and pipes."""
        self.read_control()
        while self.output_fd is not None and self.read_output():
            pass
        self.code = code

    @property
    def output(self) -> str:
        """What the rank has printed, up to 16 MiB."""
        more = f"\n[{self._dropped} more bytes were not kept]" if self._dropped else ""
        return self._output.decode(errors="replace") + more

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes of output beyond the limit, which were discarded."""
        return self._dropped

    @property
    def output_bytes(self) -> int:
        """Number of bytes printed, discarded ones included."""
        return len(self._output) + self._dropped

    def clear_output(self) -> None:
        """Discard the output received so far."""
        self._output.clear()
        self._dropped = 0

    @property
    def died(self) -> bool:
        """Whether the process ended without returning or raising, or before all ranks had returned."""
        return self.state == "exit" or self.has_ended

    @property
    def death_cause(self) -> str:
        """The cause of death as text."""
        if self._unreadable:
            return "died: what it sent cannot be read, its code must have changed Python itself"
        code = self.payload if self.state == "exit" else self.code
        after = " after it returned" if self.state == "value" else ""
        if code < 0:
            return f"died{after}: killed by {signal.Signals(-code).name}"
        return f"died{after}: exited with code {code}" + ("" if code or after else " before it returned")

    @property
    def error(self) -> RankError | None:
        """The exception that the rank raised."""
        return self.payload if self.state == "error" else None

    def clear_stack(self) -> None:
        """Discard the stack dump, before another is requested."""
        self._stack.clear()

    @property
    def stack(self) -> str:
        """The last stack dump, innermost call first, without the launcher's own frames."""
        lines = self._stack.decode(errors="replace").splitlines()[1:]
        return "\n".join(line for line in lines if _OUR_FOLDER not in line and '"<' not in line)

    @property
    def stack_is_complete(self) -> bool:
        """Whether the dump has arrived up to the outermost frame, which is code given on a command line."""
        return b'"<string>"' in self._stack

    def close(self) -> None:
        """Close the client's ends."""
        self.control.close()
        for fd in self.fds:
            os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""
