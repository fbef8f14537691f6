"""Check whether processes live, and wait for a condition."""

import os
import sys
import time
from pathlib import Path

import pytest

DEFAULT_CPU_BACKEND = "shm" if sys.platform == "linux" else "gloo"  # the backend of ranks on the CPUs of one host


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, deadline_s=120.0) -> bool:
    """Poll until the condition is true; return False if it is not by the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        os.sched_yield()
    return bool(condition())


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc")
