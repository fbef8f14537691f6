"""A limit on a process's memory: exceeding it raises an error instead of exhausting the machine."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_LEAST_BYTES = 1 << 30
_PART = 0.8  # of what is free, for all ranks of this machine together
_HEADROOM_BYTES = 64 << 20  # in a cell that begins at its limit: enough to delete what fills it


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free bytes of this machine or container; None where neither reports them."""
    found = []
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    most, now = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if most.isdigit() and now.isdigit():
        found.append(max(0, int(most) - int(now)))
    return min(found, default=None)


class MemoryLimit:
    """A limit of `extra_bytes` beyond the memory this process has at construction; `apply()` enforces it.

    local_ranks: ranks of this machine, which share the free memory if extra_bytes is None.
    The limit counts private writable memory (RLIMIT_DATA, Linux only), not address space that is merely reserved, as
    threads and CUDA do by the gigabyte.
    """

    def __init__(self, local_ranks: int, extra_bytes: int | None = None):
        free, has = available_memory(), _data_bytes()
        if extra_bytes is None and free is not None:
            extra_bytes = max(_LEAST_BYTES, int(free * _PART) // local_ranks)
        self.extra_bytes = extra_bytes if has is not None else None
        self._most = (has or 0) + (extra_bytes or 0)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Context in which allocations beyond the limit raise MemoryError, or in torch RuntimeError."""
        if self.extra_bytes is None:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = max(self._most, _data_bytes() + _HEADROOM_BYTES)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[5]) * resource.getpagesize() if pages else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
