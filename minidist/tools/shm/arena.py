"""The arena: the shared memory of one process, which the other ranks of its job map into their address space.

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


class ArenaFullError(RuntimeError):
    """The arena has no free block of the requested size."""


def create_shared_memory(num_bytes: int) -> int:
    """Create zeroed shared memory; return its file descriptor, without which no other process can map the memory."""
    if hasattr(os, "memfd_create"):
        try:
            fd = os.memfd_create("minidist-shm", os.MFD_CLOEXEC)
        except OSError:  # a sandbox may forbid it
            fd = None
        if fd is not None:
            os.ftruncate(fd, num_bytes)
            return fd
    with tempfile.TemporaryFile() as file:  # 0600, and unlinked already
        fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def map_shared_memory(fd: int) -> Tensor:
    """Map all memory of a file descriptor; return it as a uint8 tensor. It is unmapped with the tensor's last view."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


class Arena:
    """An allocator over the shared memory of this process: blocks for process groups, buffers for transfers.

    num_bytes: total size in bytes. transfer_bytes: the part of it, at the end, that is reserved for transfers (sends
    and receives). Thread-safe. fd: the file descriptor of the memory, -1 once closed. memory: all of it, (num_bytes,)
    uint8.
    """

    def __init__(self, num_bytes: int = ARENA_BYTES, transfer_bytes: int = TRANSFER_BYTES):
        self.fd = create_shared_memory(num_bytes)
        self.memory = map_shared_memory(self.fd)
        self._leases = _FreeList(0, num_bytes - transfer_bytes)
        self._transfers = _FreeList(num_bytes - transfer_bytes, num_bytes)
        self._freed = threading.Condition()

    def lease_block(self, num_bytes: int) -> int:
        """Reserve a block for a process group; return its offset in bytes. Raises ArenaFullError if none fits."""
        with self._freed:
            return self._leases.take(num_bytes)

    def largest_free_block_bytes(self) -> int:
        """Return the size in bytes of the largest block that can be leased now."""
        with self._freed:
            return self._leases.largest()

    def release_block(self, offset: int, num_bytes: int) -> None:
        """Free a block that `lease_block` has reserved."""
        with self._freed:
            self._leases.give(offset, num_bytes)

    def allocate_transfer_buffer(self, num_bytes: int) -> int:
        """Reserve a buffer for a transfer; return its offset in bytes. Blocks until `num_bytes` are free.

        Call it only once the receiver has answered: then every transfer ends and frees its buffer, and no call blocks
        forever.
        """
        with self._freed:
            while self._transfers.largest() < num_bytes:
                self._freed.wait()
            return self._transfers.take(num_bytes)

    def free_transfer_buffer(self, offset: int, num_bytes: int) -> None:
        """Free a buffer that `allocate_transfer_buffer` has reserved, and wake the transfers that wait for memory."""
        with self._freed:
            self._transfers.give(offset, num_bytes)
            self._freed.notify_all()

    def close_fd(self) -> None:
        """Close the file descriptor only: no process can map the memory any more, and existing mappings stay valid."""
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
        raise ArenaFullError(f"{size} bytes of shared memory are wanted, and {self.largest()} are free in one piece")

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
