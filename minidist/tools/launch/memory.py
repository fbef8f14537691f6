"""How much more memory a process may take, so that one that takes all of it ends its work and not the machine."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_LEAST_BYTES = 1 << 30
_PART = 0.8  # of what is free, for all ranks of this machine together
_HEADROOM_BYTES = 64 << 20  # in a cell that begins at its limit: enough to delete what fills it


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this machine, or the container we are in, has left; None where neither tells."""
    found = []
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    most, now = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if most.isdigit() and now.isdigit():
        found.append(max(0, int(most) - int(now)))
    return min(found, default=None)


class MemoryLimit:
    """So much more than this process has when this is made; `within()` holds it.

    local_ranks: how many share what is free now, when more_bytes is not given. more_bytes: None where nothing is known.

    What counts is memory the process may write and shares with nobody (Linux, RLIMIT_DATA): addresses that are only
    reserved, as threads and CUDA do by the gigabyte, do not.
    """

    def __init__(self, local_ranks: int, more_bytes: int | None = None):
        free, has = free_bytes(), _data_bytes()
        if more_bytes is None and free is not None:
            more_bytes = max(_LEAST_BYTES, int(free * _PART) // local_ranks)
        self.more_bytes = more_bytes if has is not None else None
        self._most = (has or 0) + (more_bytes or 0)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Whoever asks for more in here gets a MemoryError, or torch's RuntimeError."""
        if self.more_bytes is None:
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
