"""Check whether processes live, wait for a condition, and run a program."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CPU_BACKEND = "shm" if sys.platform == "linux" else "gloo"  # the backend of ranks on the CPUs of one host


POLL_S = 0.005  # looking at a condition without a pause would take a core from the ranks that are waited for


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
        time.sleep(POLL_S)
    return bool(condition())


def run_python(*command, **environ):
    """Run this Python with these arguments, as a fork of a warm process, and return the ended process.

    OMP_NUM_THREADS is not inherited.
    """
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return warm_python.run([sys.executable, *command], env={**kept, "PYTHONPATH": str(ROOT), **environ}, timeout=120)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc")
