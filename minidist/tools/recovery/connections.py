"""Ending what this process waits for between ranks, without the other ranks."""

import contextlib
import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from minidist.tools.shm.group import ShmGroup


def interrupt_operations(kept_inodes: set[int]) -> None:
    """Make every pending operation between this process and other ranks fail, on this rank and on the others.

    It may be called from another thread than the waiting one, which then leaves the groups with `abort_groups`.
    kept_inodes: the result of `list_open_file_inodes` before the process groups were created. gloo cannot abort an
    operation, so all connections opened after that list was made are shut down.
    """
    shut_down_connections(lambda sock: os.fstat(sock.fileno()).st_ino in kept_inodes)
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, ShmGroup):
            group.interrupt()
        elif dist.get_backend(group) == "nccl":
            group.abort()


def abort_groups() -> None:
    """Destroy all process groups of this process, without waiting for the other ranks."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


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


def list_open_file_inodes() -> set[int]:
    """Return the inode numbers of all open files of this process, sockets included."""
    inodes = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            inodes.add(os.fstat(fd).st_ino)
    return inodes
