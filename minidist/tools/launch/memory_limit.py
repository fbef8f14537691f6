"""A limit on a process's memory: exceeding it raises an error instead of exhausting the machine."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_MIN_EXTRA_BYTES = 1 << 30
_FREE_FRACTION = 0.8  # of the free memory, for all ranks of this machine together
_HEADROOM_BYTES = 64 << 20  # for a cell that begins at the limit: enough to delete variables


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free memory in bytes of this machine or container, whichever is less; None if unknown.

    proc, cgroup: folders of the kernel's files, which tests replace.
    """
    candidates = []
    for line in _read_or_empty(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            candidates.append(int(line.split()[1]) << 10)
    limit_bytes, current = (
        _read_or_empty(cgroup / "memory.max").strip(),
        _read_or_empty(cgroup / "memory.current").strip(),
    )
    if limit_bytes.isdigit() and current.isdigit():
        candidates.append(max(0, int(limit_bytes) - int(current)))
    return min(candidates, default=None)


class MemoryLimit:
    """A limit on how much memory this process may allocate in addition to what it has now; `apply()` enforces it.

    local_ranks: number of ranks on this machine. extra_bytes: the limit; None: this rank's part of 80 % of the free
    memory, divided equally among the ranks of this machine, at least 1 GiB. Only private writable memory counts
    (RLIMIT_DATA, Linux only), not address space that is merely reserved, as threads and CUDA do by the gigabyte.
    """

    def __init__(self, local_ranks: int, extra_bytes: int | None = None):
        free_bytes, data_bytes = available_memory(), _private_memory_bytes()
        if extra_bytes is None and free_bytes is not None:
            extra_bytes = max(_MIN_EXTRA_BYTES, int(free_bytes * _FREE_FRACTION) // local_ranks)
        self.extra_bytes = extra_bytes if data_bytes is not None else None
        self._limit_bytes = (data_bytes or 0) + (extra_bytes or 0)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Return a context manager inside which an allocation beyond the limit raises an error.

        torch raises RuntimeError; Python raises MemoryError.
        """
        if self.extra_bytes is None:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit_bytes = max(self._limit_bytes, _private_memory_bytes() + _HEADROOM_BYTES)
        if hard != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private_memory_bytes() -> int | None:
    """Return the private writable memory of this process in bytes; None if unknown."""
    pages = _read_or_empty(Path("/proc/self/statm")).split()
    return int(pages[5]) * resource.getpagesize() if pages else None


def _read_or_empty(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
