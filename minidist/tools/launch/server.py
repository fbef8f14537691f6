"""The rank server: a process that has imported torch but run no operation of it, and forks ranks on request.

Forking gives a fresh process with torch loaded within milliseconds. The server starts no threads: a thread does not
survive a fork, but the locks it holds do. With method "spawn" it imports nothing and starts new interpreters, as CUDA
and macOS need. It reports how each rank ended, and kills all ranks when its client ends.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Sequence

from minidist.tools.launch.huge_pages import merge_into_huge_pages
from minidist.tools.launch.protocol import MessageSocket

_PARENT_CHECK_S = 1.0
_MERGING_JOB = 10  # before it memory is merged, which takes 0.5 s; then each rank takes 10 ms less
_RANK_MODULES = (
    "torch.distributed",
    "minidist.comm.objects",
    "minidist.comm.collectives",
    "minidist.tools.launch.device",
    "minidist.tools.deadlock.status_page",  # 10 ms per rank
    "minidist.tools.launch.rank",
    "minidist.tools.shm.group_creation",  # 40 ms per rank
)


def main(fd: int, method: str, preload: Sequence[str]) -> None:
    """Run a rank server for the client at the other end of socket `fd` until the client ends.

    method: "fork" or "spawn", how ranks are started. preload: names of modules to import before the first fork.
    """
    server = _ServerProcess(MessageSocket(socket.socket(fileno=fd)), method)
    if method == "fork":
        for name in (*_RANK_MODULES, *preload):
            importlib.import_module(name)
        for finalizer in list(weakref.finalize._registry):
            finalizer.atexit = (
                False  # running torch's hundreds would cost each rank 30 ms; a rank's own finalizers still run
            )
        gc.collect()
        gc.freeze()  # garbage collection in a rank does not touch the shared pages
    server._send({"event": "ready"})
    server.serve()


class _ServerProcess:
    """Starts, signals and reaps the rank processes of one client."""

    def __init__(self, connection: MessageSocket, method: str):
        self.connection, self.method = connection, method
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (job, rank)
        self._client = os.getppid()
        self._wake_receiver, wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        wake_sender.setblocking(False)
        self._wake_sender = wake_sender
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Ranks inherit this until they have a handler: a request for their stack must not kill them before.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def serve(self) -> None:
        """Handle requests of the client and the ends of ranks until the client ends; then kill the remaining ranks."""
        while True:
            ready, _, _ = select.select([self.connection.socket, self._wake_receiver], [], [], _PARENT_CHECK_S)
            if self._wake_receiver in ready:
                self._wake_receiver.recv(4096)
            self._reap()
            # A copy of the client's socket in a child of the client hides its end; its process id does not.
            if os.getppid() != self._client:
                break
            if self.connection.socket in ready:
                messages = self.connection.receive()
                if messages is None:
                    break
                for message, fds in messages:
                    self._handle_request(message, fds)
        for pid in self.ranks:
            _kill_process_group(pid)

    def _handle_request(self, message: dict, fds: tuple[int, ...]) -> None:
        """Carry out a request of the client. fds: the descriptors that came with it."""
        if message["op"] == "start":
            if self.method == "fork" and message["job"] == _MERGING_JOB and message["rank"] == 0:
                merge_into_huge_pages()
            pid = self._fork(fds) if self.method == "fork" else _spawn(fds)
            for fd in fds:
                os.close(fd)
            self.ranks[pid] = (message["job"], message["rank"])
            self._send({"event": "started", "job": message["job"], "rank": message["rank"], "pid": pid})
        elif message["op"] == "signal":
            for pid, (job, rank) in self.ranks.items():
                if job == message["job"] and message["rank"] in (None, rank):
                    if message["signal"] == signal.SIGKILL:
                        _kill_process_group(pid)
                    else:
                        os.kill(pid, message["signal"])
        elif message["op"] == "listen":
            with socket.create_server(("127.0.0.1", 0), backlog=message["backlog"]) as listening:
                self._send({"event": "listening"}, (listening.fileno(),))

    def _fork(self, fds: tuple[int, ...]) -> int:
        """Fork a rank, which inherits `fds`; return its process id. In the rank this call never returns."""
        server = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # the rank does so too: from here on the group exists in any case
                os.setpgid(pid, pid)
            return pid
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.connection.socket.close()
            self._wake_receiver.close()
            self._wake_sender.close()
            for fd in self.connection.fds:  # of ranks not started yet
                os.close(fd)
            from minidist.tools.launch.rank import main as rank_main

            null_fd = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null_fd, 0), (fds[0], 1), (fds[1], 2)):
                os.dup2(source, target)
            status = rank_main(server, *fds[2:])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Report each rank that has ended to the client, and kill the processes that it left behind."""
        for pid in list(self.ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_process_group(pid)  # what the rank started and left behind
                job, rank = self.ranks.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                self._send({"event": "ended", "job": job, "rank": rank, "code": code})

    def _send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        """Send a message to the client. Does nothing if the client has ended."""
        with contextlib.suppress(OSError):  # the client is gone, which the next read reports
            self.connection.send(message, fds)


def _spawn(fds: tuple[int, ...]) -> int:
    """Start a new interpreter that becomes a rank; return its process id."""
    for fd in fds[2:]:
        os.set_inheritable(fd, True)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from minidist.tools.launch.rank import main; "
        f"import os; os._exit(main({os.getpid()}, {', '.join(map(str, fds[2:]))}))"
    )
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, fds[0], 1),
        (os.POSIX_SPAWN_DUP2, fds[1], 2),
    ]
    return os.posix_spawn(
        sys.executable, [sys.executable, "-P", "-c", code], os.environ, file_actions=actions, setpgroup=0
    )


def _kill_process_group(pid: int) -> None:
    """Kill a rank and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
