"""One rank seen from the client: what came from it so far."""

import contextlib
import os
import pickle
import signal
import socket
import time
from typing import Any

from minidist.tools.launch.failure import RankError
from minidist.tools.launch.protocol import Frames, send_object

_READ_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 16 << 20
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))


class RemoteRank:
    """The client's ends of what it shares with a rank.

    state: "running", then what the rank said last: "value", "error" or "exit" (`payload`). code: how its process ended,
    None while it lives.
    """

    def __init__(self, control: socket.socket, output_fd: int | None, stack_fd: int):
        self.control, self.output_fd, self.stack_fd = control, output_fd, stack_fd
        self.pid = 0
        self.state, self.payload, self.said_s = "running", None, 0.0
        self.code: int | None = None
        self.answers: list[Any] = []  # of a live rank, taken by who asked
        self._babbles = False  # it sent what nobody can read
        self._frames, self._output, self._dropped, self._stack = Frames(), bytearray(), 0, bytearray()
        control.setblocking(True)
        for fd in self.fds:
            os.set_blocking(fd, False)

    @property
    def fds(self) -> list[int]:
        return [fd for fd in (self.output_fd, self.stack_fd) if fd is not None]

    @property
    def gone(self) -> bool:
        return self.code is not None

    def start(self, bootstrap: dict) -> None:
        """Tell the rank what to do; blocks until it has begun to listen and taken all of it in."""
        self._send(bootstrap)
        self.control.setblocking(False)

    def release(self) -> None:
        """Let a rank that has returned end its process."""
        self.tell("end")

    def tell(self, message: Any) -> None:
        """Send a message to a rank that waits for one."""
        self.control.setblocking(True)
        self._send(message)
        self.control.setblocking(False)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it died, and the server will say how
            send_object(self.control, message)

    def read_control(self) -> bool:
        """Take in what the rank said; False when nothing more will come, or nothing that can be read."""
        while not self._babbles:
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
                except Exception:  # its code may have changed anything in its process, what we send with as well
                    self._babbles, self.state, self.said_s = True, "exit", time.monotonic()
                    return False
                if kind == "answer":
                    self.answers.append(payload)
                    continue
                self.state, self.payload, self.said_s = kind, payload, time.monotonic()
        return False

    def read_output(self) -> bool:
        data = _read(self.output_fd)
        room = max(0, _MAX_OUTPUT_BYTES - len(self._output))
        self._output += data[:room]
        self._dropped += len(data) - len(data[:room])
        return bool(data)

    def read_stack(self) -> bool:
        data = _read(self.stack_fd)
        self._stack += data
        return bool(data)

    def ended(self, code: int) -> None:
        """The process is gone: take in what it left in the sockets."""
        self.read_control()
        while self.output_fd is not None and self.read_output():
            pass
        self.code = code

    @property
    def output(self) -> str:
        more = f"\n[{self._dropped} more bytes were not kept]" if self._dropped else ""
        return self._output.decode(errors="replace") + more

    @property
    def dropped(self) -> int:
        """How many bytes of output were not kept."""
        return self._dropped

    @property
    def printed(self) -> int:
        """How many bytes of output there are."""
        return len(self._output) + self._dropped

    def forget_output(self) -> None:
        self._output.clear()
        self._dropped = 0

    @property
    def died(self) -> bool:
        """Whether it ended without returning or raising, or before the others had returned as well."""
        return self.state == "exit" or self.gone

    @property
    def death(self) -> str:
        """How it died, in words."""
        if self._babbles:
            return "died: what it sent cannot be read, its code must have changed Python itself"
        code = self.payload if self.state == "exit" else self.code
        after = " after it returned" if self.state == "value" else ""
        if code < 0:
            return f"died{after}: killed by {signal.Signals(-code).name}"
        return f"died{after}: exited with code {code}" + ("" if code or after else " before it returned")

    @property
    def error(self) -> RankError | None:
        return self.payload if self.state == "error" else None

    def forget_stack(self) -> None:
        self._stack.clear()

    @property
    def stack(self) -> str:
        """The last stack dumped, innermost call first, our own frames around the function left out."""
        lines = self._stack.decode(errors="replace").splitlines()[1:]
        return "\n".join(line for line in lines if _OUR_FOLDER not in line and '"<' not in line)

    @property
    def stack_is_whole(self) -> bool:
        """The outermost frame of every rank is code given on a command line."""
        return b'"<string>"' in self._stack

    def close(self) -> None:
        self.control.close()
        for fd in self.fds:
            os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""
