"""The resources that all groups of one process share: arena, listening socket, worker threads and watch thread.

The arena is the shared memory of the process, which other ranks map (`arena`). The watch thread accepts connections and
notices peers that end; it never waits for a group. It learns of a process's end from the process descriptor (pidfd):
unlike a socket, no forked child can hold that open.
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

from minidist.tools.shm.arena import Arena, map_shared_memory
from minidist.tools.shm.operation_queue import WorkerPool, is_in_worker_thread

_HELLO_S = 10.0
_MESSAGE_BYTES = 4096
_POLL_S = 1e-4


class WatchedProcess(NamedTuple):
    """A process whose end is awaited through `pidfd`, a file descriptor that becomes readable when the process ends.

    Compare objects by identity: after the descriptor is closed, the system reuses its number.
    """

    pidfd: int


class ProcessContext:
    """The resources that all shm groups of this process share: memory, listening socket, worker threads, watch thread.

    token: the address of this process, which other processes pass to `connect`. arena: the memory that this process
    shares with other ranks. workers: the threads for operations. changed: a condition that is notified when another
    process has connected or a peer has left.
    """

    def __init__(self):
        self.pid = os.getpid()
        self.arena, self.workers = Arena(), WorkerPool()
        self.token = secrets.token_hex(16)
        self.changed = threading.Condition()
        self._connections: dict[tuple, tuple[socket.socket, int]] = {}
        self._arenas: dict[str, Tensor] = {self.token: self.arena.memory}
        self._watched: dict[int, Callable[[], None]] = {}
        self._processes: dict[int, WatchedProcess] = {}  # by file descriptor
        self._retired_groups: list[tuple[list[socket.socket], list[tuple[int, int]]]] = []
        self._group_count = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0minidist-" + self.token)
        self._listener.listen(1024)
        self._wake_receiver, self._wake_sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        for sock in (self._listener, self._wake_receiver):
            self._poll.register(sock, select.POLLIN)
        self._open = True
        threading.Thread(target=self._run_watch_thread, name="shm-watch", daemon=True).start()

    # -- connections --------------------------------------------------------------------------------------------------

    def connect(self, token: str, connection_name: tuple) -> tuple[socket.socket, int]:
        """Connect to another process of the job; return the connected socket and the id of that process.

        token: `ProcessContext.token` of that process. connection_name: the name with which that process calls
        `wait_for_connection`. Both processes map the memory (`Arena`) that the other one shares. Raises ConnectionError
        if the process does not answer or belongs to another user.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect("\0minidist-" + token)
        pid = _get_peer_pid(sock)
        socket.send_fds(sock, [json.dumps([self.token, connection_name]).encode()], [self.arena.fd])
        set_socket_timeout(sock, _HELLO_S)
        answer, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
        if answer != b"welcome":
            raise ConnectionError(f"process {pid} did not answer")
        self._map_arena(token, fds)
        return sock, pid

    def wait_for_connection(
        self, connection_name: tuple, still_wanted: Callable[[], bool], timeout_s: float
    ) -> tuple[socket.socket, int] | None:
        """Wait until another process connects under this name; return the socket and the id of that process.

        still_wanted: a function without arguments that returns whether to wait on; code that changes its result must
        notify `changed`. Returns None after `timeout_s` seconds, or once `still_wanted()` is False.
        """
        with self.changed:
            self.changed.wait_for(lambda: connection_name in self._connections or not still_wanted(), timeout_s)
            return self._connections.pop(connection_name, None)

    def get_arena(self, token: str) -> Tensor:
        """Return the shared memory, (bytes,) uint8, of the process with this token: this one or a connected one."""
        return self._arenas[token]

    def _accept(self) -> None:
        """Accept a connection from another process: exchange arenas with it and store the connected socket."""
        sock, _ = self._listener.accept()
        try:
            pid = _get_peer_pid(sock)
            set_socket_timeout(sock, _HELLO_S)
            hello, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
            token, name = json.loads(hello)
            self._map_arena(token, fds)
            socket.send_fds(sock, [b"welcome"], [self.arena.fd])
        except (OSError, ValueError):
            sock.close()
            return
        with self.changed:
            self._connections[tuple(name)] = (sock, pid)
            self.changed.notify_all()

    def _map_arena(self, token: str, fds: list[int]) -> None:
        """Map the arena behind `fds` as that of the process `token`, unless it is mapped already; close `fds`."""
        for fd in fds:
            if token not in self._arenas:
                self._arenas[token] = map_shared_memory(fd)
            os.close(fd)

    # -- peers that end -----------------------------------------------------------------------------------------------

    def watch_socket(self, sock: socket.socket, on_close: Callable[[], None]) -> None:
        """Call `on_close` once, in the watch thread, when the other end of this socket closes the connection."""
        with self.changed:
            self._watched[sock.fileno()] = on_close
        self._poll.register(sock.fileno(), select.POLLRDHUP)
        self._wake_watch_thread()

    def watch_process(self, pid: int, on_end: Callable[[], None]) -> "WatchedProcess | None":
        """Call `on_end` once, in the watch thread, when the process ends; return a handle for `unwatch_process`.

        Returns None, and never calls `on_end`, if the system has no pidfd or the process has already ended. In these
        cases only the closed socket of a connection to the process shows its end (see `watch_socket`).
        """
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return None
        process = WatchedProcess(fd)
        with self.changed:
            self._watched[fd], self._processes[fd] = on_end, process
        self._poll.register(fd, select.POLLIN)
        self._wake_watch_thread()
        return process

    def unwatch_socket(self, fd: int) -> None:
        """Stop watching the socket with this file descriptor. Does nothing if the socket is not watched."""
        with self.changed:
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def unwatch_process(self, process: "WatchedProcess | None") -> None:
        """Stop watching the end of a process. Does nothing if the process has ended or is None."""
        with self.changed:
            if process is not None and self._processes.get(process.pidfd) is process:
                self.unwatch_socket(process.pidfd)
                del self._processes[process.pidfd]
                os.close(process.pidfd)

    def _wake_watch_thread(self) -> None:
        """Interrupt the poll of the watch thread."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"!", socket.MSG_DONTWAIT)

    def _run_watch_thread(self) -> None:
        """Accept connections and report closed sockets and ended processes, until this context is closed."""
        while self._open:
            for fd, _ in self._poll.poll():
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._wake_receiver.fileno():
                    self._wake_receiver.recv(16)
                else:
                    self._on_hangup(fd)
        for sock in (self._listener, self._wake_receiver, self._wake_sender):
            sock.close()

    def _on_hangup(self, fd: int) -> None:
        """Call the callback of the socket or process with this descriptor, if it has really closed or ended."""
        again = select.poll()
        with self.changed:  # the number may belong to another file by now; under the lock it cannot change
            gone = self._watched.get(fd)
            again.register(fd, select.POLLIN if fd in self._processes else select.POLLRDHUP)
            if gone is None or not again.poll(0):
                return
            self.unwatch_process(self._processes[fd]) if fd in self._processes else self.unwatch_socket(fd)
        gone()

    # -- groups made and destroyed -----------------------------------------------------------------------------------

    def retire_group(self, socks: list[socket.socket], blocks: list[tuple[int, int]]) -> None:
        """Release a destroyed group: close its sockets for sending; free its memory once no other rank can read it.

        socks: the sockets to the group's other ranks. blocks: (offset, size) in bytes of each block of shared memory
        that the group has reserved on this rank. Does not block: `reclaim_memory` frees later what other ranks can
        still read.
        """
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        with self.changed:
            self._retired_groups.append((socks, blocks))
        self.reclaim_memory()

    def reclaim_memory(self) -> None:
        """Free the memory of each group passed to `retire_group` that all other ranks have left, too. Never blocks."""
        with self.changed:
            retired, self._retired_groups = self._retired_groups, []
            for socks, blocks in retired:
                socks = [sock for sock in socks if not _close_if_peer_closed(sock)]
                if socks:
                    self._retired_groups.append((socks, blocks))
                    continue
                for offset, size in blocks:
                    self.arena.release_block(offset, size)

    def add_group_reference(self) -> None:
        """Increment the number of groups that use this context."""
        self._group_count += 1

    def drop_group_reference(self) -> bool:
        """Decrement the number of groups that use this context; at zero, close the context and return True."""
        self._group_count -= 1
        if self._group_count:
            return False
        self._open = False
        self._wake_watch_thread()
        for sock in [sock for socks, _ in self._retired_groups for sock in socks] + [
            sock for sock, _ in self._connections.values()
        ]:
            sock.close()
        self.workers.request_stop()
        self.arena.close_fd()
        return True


def _close_if_peer_closed(sock: socket.socket) -> bool:
    """Close `sock` and return True if its peer has closed the connection, else return False.

    Discards messages that have arrived.
    """
    try:
        while sock.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    sock.close()
    return True


def _get_peer_pid(sock: socket.socket) -> int:
    """Return the id of the process at the other end. Raises ConnectionError if it belongs to another user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"process {pid} belongs to user {uid}")
    return pid


def receive_message(sock: socket.socket, max_bytes: int) -> bytes:
    """Wait for the next message of at most `max_bytes` and return it; b"" if the peer has closed the connection.

    Raises BlockingIOError after the socket's timeout, ConnectionResetError if the peer closed with messages unread.

    The ranks of a group arrive microseconds apart, while sleeping and waking takes tens of microseconds. So the waiting
    thread first polls for 0.1 ms and yields its core to other ranks in between; then it sleeps in `recv`. A worker
    thread sleeps at once, because its process computes meanwhile.
    """
    end_s = time.monotonic() + (0.0 if is_in_worker_thread() else _POLL_S)
    while time.monotonic() < end_s:
        try:
            return sock.recv(max_bytes, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()
    return sock.recv(max_bytes)


def set_socket_timeout(sock: socket.socket, seconds: float, receive_s: float | None = None) -> None:
    """Set how long a blocking send or receive on this socket may take before it raises BlockingIOError.

    seconds: the limit for both. receive_s: another limit, in seconds, for receives; None: `seconds`.

    `socket.socket.settimeout` would cost a second system call per message.
    """
    for option, limit_s in ((socket.SO_SNDTIMEO, seconds), (socket.SO_RCVTIMEO, receive_s or seconds)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))
