"""The memory of one process that the others of its job see.

`memfd_create` gives memory without a name, so nothing is left behind however a process ends, and /dev/shm with its
limit is not touched. Where the system has no such call, it is a file that is unlinked before anything is written.
"""

import mmap
import os
import tempfile
import threading

import torch
from torch import Tensor

ARENA_BYTES = 8 * 2**20
TRANSFER_BYTES = 2 * 2**20  # the end of the arena, for transfers on their way; the rest is leased to groups
_ALIGN = 4096


class ArenaFull(RuntimeError):
    """No room for another block."""


def make_memory(size: int) -> int:
    """A file descriptor of `size` bytes of zeroed memory that only those see to whom it is given."""
    if hasattr(os, "memfd_create"):
        try:
            fd = os.memfd_create("minidist-shm", os.MFD_CLOEXEC)
        except OSError:  # a sandbox may forbid it
            fd = None
        if fd is not None:
            os.ftruncate(fd, size)
            return fd
    with tempfile.TemporaryFile() as file:  # 0600, and unlinked already
        fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def map_memory(fd: int) -> Tensor:
    """The memory behind a descriptor as bytes: a uint8 tensor. It lives as long as the tensor or a view of it."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


class Arena:
    """This process's own memory and which parts of it are taken. Safe to use from several threads."""

    def __init__(self, size: int = ARENA_BYTES, transfers: int = TRANSFER_BYTES):
        self.fd = make_memory(size)
        self.memory = map_memory(self.fd)
        self._leases = _Room(0, size - transfers)
        self._transfers = _Room(size - transfers, size)
        self._freed = threading.Condition()

    def lease(self, size: int) -> int:
        """Offset of `size` bytes for a group. Raises ArenaFull."""
        with self._freed:
            return self._leases.take(size)

    def free_bytes(self) -> int:
        """The largest block that can be leased now."""
        with self._freed:
            return self._leases.largest()

    def release(self, offset: int, size: int) -> None:
        with self._freed:
            self._leases.give(offset, size)

    def borrow(self, size: int) -> int:
        """Offset of `size` bytes for a transfer, as soon as there are some.

        Only transfers whose receiver is there may hold any: then all that are held come back.
        """
        with self._freed:
            while self._transfers.largest() < size:
                self._freed.wait()
            return self._transfers.take(size)

    def give_back(self, offset: int, size: int) -> None:
        with self._freed:
            self._transfers.give(offset, size)
            self._freed.notify_all()

    def close(self) -> None:
        """Let nobody else in. Who has mapped the memory keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Room:
    """First fit over a range of bytes."""

    def __init__(self, begin: int, end: int):
        self._gaps = [(begin, end)]

    def largest(self) -> int:
        return max((end - begin for begin, end in self._gaps), default=0)

    def take(self, size: int) -> int:
        size = _rounded(size)
        for i, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        raise ArenaFull(f"{size} bytes of shared memory are wanted, and {self.largest()} are free in one piece")

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._gaps, (offset, offset + _rounded(size))]):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._gaps = merged


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
