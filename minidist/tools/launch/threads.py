"""The number of threads per rank: the cores this process may really use, divided by the ranks of this machine.

By default torch uses every core it sees, in every rank. Two ranks with two threads each on two cores are over ten
times slower than with one thread each, because each waits for threads that the other keeps from running.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from minidist.errors import UserError


def threads_per_rank(local_ranks: int, environ: Mapping[str, str] = os.environ, cores: int | None = None) -> int:
    """Return the number of threads for each rank: OMP_NUM_THREADS if set, else `max(1, cores // local_ranks)`.

    local_ranks: number of ranks on this machine. environ: the environment variables. cores: number of cores that the
    ranks share; None: `usable_cores()`. Raises UserError if OMP_NUM_THREADS is not a positive number.
    """
    value = environ.get("OMP_NUM_THREADS")
    if value:
        first = value.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
        if not first.isdigit() or int(first) < 1:
            raise UserError(f"OMP_NUM_THREADS is {value!r}; set it to a whole number of at least 1, or unset it")
        return int(first)
    return max(1, (usable_cores() if cores is None else cores) // local_ranks)


def usable_cores(affinity: int | None = None, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: its affinity mask, limited by the CPU quota of its cgroup.

    affinity: number of cores in the mask; None: read from the system. proc, cgroup: folders of the kernel's files,
    which tests replace.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _find_quota_cores(proc, cgroup)
    # Rounded down: with 1.5 cores a second thread would be throttled for half of every period while the first waits.
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _find_quota_cores(proc: Path, cgroup: Path) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its parents, in cores; None without one."""
    quotas = []
    for line in _read_or_empty(proc / "self" / "cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            folder, quota_of = cgroup, _read_quota_v2
        elif "cpu" in controllers.split(","):
            folder, quota_of = cgroup / controllers, _read_quota_v1
            folder = folder if folder.is_dir() else cgroup / "cpu"
        else:
            continue
        # Inside a container the path may be that of the host: parts that are not mounted here are skipped.
        parts = [part for part in path.split("/") if part]
        quotas += [quota_of(folder.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota_v2(folder: Path) -> float | None:
    """Return the CPU quota of a folder of cgroup version 2, in cores; None without one."""
    words = _read_or_empty(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _read_quota_v1(folder: Path) -> float | None:
    """Return the CPU quota of a folder of cgroup version 1, in cores; None without one."""
    quota, period = _read_or_empty(folder / "cpu.cfs_quota_us"), _read_or_empty(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read_or_empty(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
