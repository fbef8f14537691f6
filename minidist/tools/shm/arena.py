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
    """The `Arena`, the memory that a process shares with other ranks, has no free block of the requested size."""


def create_shared_memory(num_bytes: int) -> int:
    """Create `num_bytes` of zeroed shared memory without a name; return its file descriptor.

    Another process can map the memory only if it receives this descriptor over a socket.
    """
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
    """Map the shared memory of file descriptor `fd` into this process; return all of it as a uint8 tensor (bytes,).

    The memory is unmapped when the last view of the tensor is freed.
    """
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


class Arena:
    """The memory that this process shares with other ranks, and its allocator. Thread-safe.

    Process groups reserve blocks for their collectives; sends and receives reserve buffers in a separate part.

    num_bytes: total size in bytes. transfer_bytes: size in bytes of the part at the end that is reserved for sends and
    receives. fd: the file descriptor of the memory, -1 after `close_fd`. memory: the whole memory, a uint8 tensor
    (num_bytes,).
    """

    def __init__(self, num_bytes: int = ARENA_BYTES, transfer_bytes: int = TRANSFER_BYTES):
        self.fd = create_shared_memory(num_bytes)
        self.memory = map_shared_memory(self.fd)
        self._leases = _FreeList(0, num_bytes - transfer_bytes)
        self._transfers = _FreeList(num_bytes - transfer_bytes, num_bytes)
        self._freed = threading.Condition()

    def lease_block(self, num_bytes: int) -> int:
        """Reserve `num_bytes` of shared memory for a process group; return its offset in bytes from the arena's start.

        Does not block: raises ArenaFullError if no free block is large enough.
        """
        with self._freed:
            return self._leases.take(num_bytes)

    def largest_free_block_bytes(self) -> int:
        """Return the size in bytes of the largest block that `lease_block` can reserve now."""
        with self._freed:
            return self._leases.largest()

    def release_block(self, offset: int, num_bytes: int) -> None:
        """Free the block at byte `offset` that `lease_block(num_bytes)` reserved."""
        with self._freed:
            self._leases.give(offset, num_bytes)

    def allocate_transfer_buffer(self, num_bytes: int) -> int:
        """Reserve `num_bytes` of shared memory for one send; return the offset in bytes. Blocks until it is free.

        Call this only after the receiver has posted its receive: then every send that holds memory makes progress and
        frees it, so no call blocks forever.
        """
        with self._freed:
            while self._transfers.largest() < num_bytes:
                self._freed.wait()
            return self._transfers.take(num_bytes)

    def free_transfer_buffer(self, offset: int, num_bytes: int) -> None:
        """Free a buffer that `allocate_transfer_buffer(num_bytes)` reserved at byte `offset`; wake waiting sends."""
        with self._freed:
            self._transfers.give(offset, num_bytes)
            self._freed.notify_all()

    def close_fd(self) -> None:
        """Close the file descriptor of the shared memory: no other process can map the memory from now on.

        Existing mappings, in this and in other processes, stay valid.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _FreeList:
    """First-fit allocator over a range of bytes."""

    def __init__(self, begin: int, end: int):
        self._gaps = [(begin, end)]

    def largest(self) -> int:
        """Return the size in bytes of the largest free block."""
        return max((end - begin for begin, end in self._gaps), default=0)

    def take(self, size: int) -> int:
        """Reserve a block of `size` bytes; return its offset. Raises ArenaFullError if none is large enough."""
        size = _round_up(size)
        for i, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        raise ArenaFullError(f"{size} bytes of shared memory are wanted, and {self.largest()} are free in one piece")

    def give(self, offset: int, size: int) -> None:
        """Free the block of `size` bytes at `offset` and join it with free neighbours."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._gaps, (offset, offset + _round_up(size))]):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._gaps = merged


def _round_up(size: int) -> int:
    """Return `size` rounded up to a multiple of the alignment."""
    return -(-size // _ALIGN) * _ALIGN
