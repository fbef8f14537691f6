"""This process among the others of its machine: who can reach it, who is connected, and who is still alive.

One thread per process listens and watches; it never waits for a group. A process is known to be dead from its process
descriptor, which no forked child can hold open, as it could a socket.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from minidist.tools.shm.arena import Arena, map_memory
from minidist.tools.shm.lane import Workers, in_worker

_HELLO_S = 10.0
_MESSAGE_BYTES = 4096
_GIVE_WAY_S = 1e-4


class ProcessDescriptor(NamedTuple):
    """A watched process. Its number is given to another file once it is closed, so it is compared by identity."""

    fd: int


class Neighbours:
    """What this process has in common for all of its groups: arena, address, connections, worker threads."""

    def __init__(self):
        self.pid = os.getpid()
        self.arena, self.workers = Arena(), Workers()
        self.token = secrets.token_hex(16)
        self.changed = threading.Condition()  # of the connections that have come, and of who is gone
        self._arrived: dict[tuple, tuple[socket.socket, int]] = {}
        self._arenas: dict[str, Tensor] = {self.token: self.arena.memory}
        self._watched: dict[int, Callable[[], None]] = {}
        self._processes: dict[int, ProcessDescriptor] = {}  # by file descriptor
        self._retired: list[tuple[list[socket.socket], list[tuple[int, int]]]] = []
        self._users = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0minidist-" + self.token)
        self._listener.listen(1024)
        self._bell, self._rope = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        for sock in (self._listener, self._bell):
            self._poll.register(sock, select.POLLIN)
        self._open = True
        threading.Thread(target=self._watch, name="shm-watch", daemon=True).start()

    # -- connections --------------------------------------------------------------------------------------------------

    def connect(self, token: str, name: tuple) -> tuple[socket.socket, int]:
        """A connection to the process with that token, which finds it under `name`; and that process's id."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect("\0minidist-" + token)
        pid = _of_ours(sock)
        socket.send_fds(sock, [json.dumps([self.token, name]).encode()], [self.arena.fd])
        patience(sock, _HELLO_S)
        answer, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
        if answer != b"welcome":
            raise ConnectionError(f"process {pid} did not answer")
        self._know(token, fds)
        return sock, pid

    def arrival(self, name: tuple, wanted: Callable[[], bool], timeout_s: float) -> tuple[socket.socket, int] | None:
        """The connection that another process has made under `name`; None when it did not come, or is not `wanted`."""
        with self.changed:
            self.changed.wait_for(lambda: name in self._arrived or not wanted(), timeout_s)
            return self._arrived.pop(name, None)

    def memory(self, token: str) -> Tensor:
        """The arena of a process that is connected."""
        return self._arenas[token]

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        try:
            pid = _of_ours(sock)
            patience(sock, _HELLO_S)
            hello, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
            token, name = json.loads(hello)
            self._know(token, fds)
            socket.send_fds(sock, [b"welcome"], [self.arena.fd])
        except (OSError, ValueError):
            sock.close()
            return
        with self.changed:
            self._arrived[tuple(name)] = (sock, pid)
            self.changed.notify_all()

    def _know(self, token: str, fds: list[int]) -> None:
        for fd in fds:
            if token not in self._arenas:
                self._arenas[token] = map_memory(fd)
            os.close(fd)

    # -- who is gone --------------------------------------------------------------------------------------------------

    def watch(self, sock: socket.socket, gone: Callable[[], None]) -> None:
        """Call `gone`, once, when the other end of this connection is closed."""
        with self.changed:
            self._watched[sock.fileno()] = gone
        self._poll.register(sock.fileno(), select.POLLRDHUP)
        self._ring()

    def watch_process(self, pid: int, gone: Callable[[], None]) -> "ProcessDescriptor | None":
        """Call `gone`, once, when the process has ended. Returns what `forget_process` takes."""
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel, a sandbox, a process that has ended: its sockets tell too
            return None
        process = ProcessDescriptor(fd)
        with self.changed:
            self._watched[fd], self._processes[fd] = gone, process
        self._poll.register(fd, select.POLLIN)
        self._ring()
        return process

    def forget(self, fd: int) -> None:
        """Watch this no longer."""
        with self.changed:
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def forget_process(self, process: "ProcessDescriptor | None") -> None:
        """Watch this process no longer. Does nothing once it has ended: another may have its descriptor's number."""
        with self.changed:
            if process is not None and self._processes.get(process.fd) is process:
                self.forget(process.fd)
                del self._processes[process.fd]
                os.close(process.fd)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._rope.send(b"!", socket.MSG_DONTWAIT)

    def _watch(self) -> None:
        while self._open:
            for fd, _ in self._poll.poll():
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._bell.fileno():
                    self._bell.recv(16)
                else:
                    self._lost(fd)
        for sock in (self._listener, self._bell, self._rope):
            sock.close()

    def _lost(self, fd: int) -> None:
        again = select.poll()
        with self.changed:  # the number may have been given to another while we looked; from here on it is not
            gone = self._watched.get(fd)
            again.register(fd, select.POLLIN if fd in self._processes else select.POLLRDHUP)
            if gone is None or not again.poll(0):
                return
            self.forget_process(self._processes[fd]) if fd in self._processes else self.forget(fd)
        gone()

    # -- coming and going of groups -----------------------------------------------------------------------------------

    def retire(self, socks: list[socket.socket], blocks: list[tuple[int, int]]) -> None:
        """Close a group's connections, and have its memory again when no other rank can still be reading it."""
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        with self.changed:
            self._retired.append((socks, blocks))
        self.reclaim()

    def reclaim(self) -> None:
        """Take back the memory of destroyed groups that all their ranks have left."""
        with self.changed:
            retired, self._retired = self._retired, []
            for socks, blocks in retired:
                socks = [sock for sock in socks if not _closed_by_other(sock)]
                if socks:
                    self._retired.append((socks, blocks))
                    continue
                for offset, size in blocks:
                    self.arena.release(offset, size)

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> bool:
        """One group less; with the last everything is closed. Whether it was the last."""
        self._users -= 1
        if self._users:
            return False
        self._open = False
        self._ring()
        for sock in [sock for socks, _ in self._retired for sock in socks] + [
            sock for sock, _ in self._arrived.values()
        ]:
            sock.close()
        self.workers.close()
        self.arena.close()
        return True


def _closed_by_other(sock: socket.socket) -> bool:
    """Whether the other end is closed; if so this one is closed too. What still comes is of no interest."""
    try:
        while sock.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    sock.close()
    return True


def _of_ours(sock: socket.socket) -> int:
    """The process at the other end. Raises ConnectionError for one of another user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"process {pid} belongs to user {uid}")
    return pid


def receive(sock: socket.socket, size: int) -> bytes:
    """The next message, of at most `size` bytes. Raises what `recv` does.

    The ranks of a group are mostly microseconds apart, and to sleep and be woken takes tens of them. So before it
    sleeps, who waits gives way for a moment to whoever else wants this core: to a rank that shares it first of all.
    A worker thread sleeps at once, as its process computes meanwhile.
    """
    end_s = time.monotonic() + (0.0 if in_worker() else _GIVE_WAY_S)
    while time.monotonic() < end_s:
        try:
            return sock.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()
    return sock.recv(size)


def patience(sock: socket.socket, seconds: float, receive_s: float | None = None) -> None:
    """Set how long a blocking send or receive on this socket may take. receive_s: for receives, `seconds` when None.

    Python's own `settimeout` would need two system calls for each message instead of one.
    """
    for option, limit_s in ((socket.SO_SNDTIMEO, seconds), (socket.SO_RCVTIMEO, receive_s or seconds)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))
