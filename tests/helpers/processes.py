"""Whether processes are there, and waiting for something without a clock to guess."""

import os
import sys
import time
from pathlib import Path

import pytest

AUTO = "shm" if sys.platform == "linux" else "gloo"  # the backend of ranks on the CPUs of one host


def alive(pid: int) -> bool:
    """Whether the process exists and is not just a zombie that its parent has not asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, deadline_s=120.0) -> bool:
    """Whether the condition comes true by the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        os.sched_yield()
    return bool(condition())


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc")
