"""Ending what this process waits for between ranks, without the other ranks."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist

from minidist.tools.shm.group import ShmGroup

_WATCH_S = 0.1
_INTERRUPTIONS = 10  # after so many, `_WATCH_S` apart, a pending operation is abandoned


class LossWatch:
    """A thread that makes the operations of this process fail once ranks of its process groups are lost.

    gloo does not wake a wait for a send that it has begun to write when the connection breaks. So the thread also sets
    `must_abandon`, once it has interrupted the operations for a second: the `World.must_abandon` of the groups.

    find_lost_rank: called in the thread; returns whether a rank is lost, as a description or None. Make the watch
    before the groups connect: `open_before` are the files that stay open.
    """

    def __init__(self, find_lost_rank: Callable[[], str | None]):
        self._find_lost_rank, self._stop = find_lost_rank, threading.Event()
        self._thread = threading.Thread(target=self._run, name="loss-watch", daemon=True)
        self.open_before, self.must_abandon = list_open_files(), threading.Event()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        interruptions = 0
        while not self._stop.wait(_WATCH_S):
            if self._find_lost_rank():
                interrupt_operations(self.open_before)
                interruptions += 1
                if interruptions == _INTERRUPTIONS:
                    self.must_abandon.set()


def interrupt_operations(kept_files: set[tuple[int, int]]) -> None:
    """Make every pending operation between this process and other ranks fail, on this rank and on the others.

    It may be called from another thread than the waiting one, which then leaves the groups with `abort_groups`.
    kept_files: the result of `list_open_files` before the process groups were created. gloo cannot abort an operation,
    so all connections opened after that list was made are shut down.
    """
    shut_down_connections(lambda sock: _identify_file(sock.fileno()) in kept_files)
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, ShmGroup):
            group.interrupt()
        elif dist.get_backend(group) == "nccl":
            group.abort()


def abort_groups(keep_s: float = 0.0) -> None:
    """Destroy all process groups of this process, without waiting for the other ranks.

    keep_s: seconds for which the groups of gloo stay in memory, with their threads. Their destructor waits for their
    operations, and gloo may end an interrupted operation only by its timeout (see `Handle.wait`).
    """
    if not dist.is_initialized():
        return
    kept = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
    dist.distributed_c10d._abort_process_group()
    if kept and keep_s:
        timer = threading.Timer(min(keep_s, threading.TIMEOUT_MAX), kept.clear)
        timer.daemon = True
        timer.start()


def shut_down_connections(is_kept: Callable[[socket.socket], bool]) -> None:
    """Shut down the TCP connections of this process, so that gloo's pending operations fail here and on the peers.

    is_kept: returns True for a connection that must stay open.
    """
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # not a socket, or closed by now
            continue
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                if not is_kept(sock):
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it only listens: without its socket, gloo would abort the process
            pass
        finally:
            sock.detach()


def list_open_files() -> set[tuple[int, int]]:
    """Return the device and inode numbers of all open files of this process, sockets included."""
    files = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            files.add(_identify_file(fd))
    return files


def _identify_file(fd: int) -> tuple[int, int]:
    """Return the device and inode number of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino  # the inode number alone may be that of a file on another device
