"""The arena: memory of one process that the other ranks of its job map.

`memfd_create` makes memory without a name, so nothing is left behind however a process ends, and /dev/shm with its
size limit is not used. Without that call the arena is a temporary file that is unlinked before anything is written.
"""

import mmap
import os
import tempfile
import threading

import torch
from torch import Tensor

ARENA_BYTES = 8 * 2**20
TRANSFER_BYTES = 2 * 2**20  # the end of the arena, for transfers in flight; the rest is leased to groups
_ALIGN = 4096


class ArenaFull(RuntimeError):
    """The arena has no free block of the requested size."""


def make_memory(size: int) -> int:
    """Return a file descriptor of `size` zeroed bytes, visible only to processes that are given the descriptor."""
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
    """Map the memory of a file descriptor as a uint8 tensor, for as long as the tensor or a view of it lives."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


class Arena:
    """An allocator over the shared memory of this process: leases for groups, buffers for transfers. Thread-safe."""

    def __init__(self, size: int = ARENA_BYTES, transfers: int = TRANSFER_BYTES):
        self.fd = make_memory(size)
        self.memory = map_memory(self.fd)
        self._leases = _FreeList(0, size - transfers)
        self._transfers = _FreeList(size - transfers, size)
        self._freed = threading.Condition()

    def lease(self, size: int) -> int:
        """Reserve `size` bytes for a group; return their offset. Raises ArenaFull."""
        with self._freed:
            return self._leases.take(size)

    def largest_free_block(self) -> int:
        """Return the size of the largest block that can be leased now."""
        with self._freed:
            return self._leases.largest()

    def release(self, offset: int, size: int) -> None:
        """Free the block of a lease."""
        with self._freed:
            self._leases.give(offset, size)

    def allocate_transfer(self, size: int) -> int:
        """Reserve `size` bytes for a transfer; return their offset. Waits until they are free.

        Only a transfer whose receiver has answered may reserve memory, so every reservation is freed again.
        """
        with self._freed:
            while self._transfers.largest() < size:
                self._freed.wait()
            return self._transfers.take(size)

    def free_transfer(self, offset: int, size: int) -> None:
        """Free the block of a transfer."""
        with self._freed:
            self._transfers.give(offset, size)
            self._freed.notify_all()

    def close(self) -> None:
        """Close the file descriptor, so that no other process can map the memory. Existing mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _FreeList:
    """First-fit allocator over a range of bytes."""

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
