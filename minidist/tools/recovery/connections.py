"""Ending what this process waits for between ranks, without the other ranks."""

import contextlib
import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from minidist.tools.shm.group import ShmGroup


def interrupt_operations(open_before: set[int]) -> None:
    """Make all operations of this process that wait for another rank fail, and those of the ranks that wait for it.

    Another thread than the waiting one may call it; that one then leaves the groups with `abort_groups`.
    open_before: as `list_open_files` returned it before the groups were created. gloo has no abort: its connections are
    shut, which are those opened since.
    """
    shut_down_connections(lambda sock: os.fstat(sock.fileno()).st_ino in open_before)
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, ShmGroup):
            group.interrupt()
        elif dist.get_backend(group) == "nccl":
            group.abort()


def abort_groups() -> None:
    """Leave all process groups without waiting for the other ranks; nccl's communicators are aborted together."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def shut_down_connections(is_kept: Callable[[socket.socket], bool]) -> None:
    """Shut the TCP connections of this process, so that operations of gloo that wait for a peer fail, here and there.

    is_kept: which connections not to shut.
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


def list_open_files() -> set[int]:
    """Return the inodes of the open files of this process, sockets among them."""
    inodes = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            inodes.add(os.fstat(fd).st_ino)
    return inodes
