"""Detects ranks that are blocked inside torch, which the rank status does not show: DDP's backward, `new_group`.

A rank whose threads all sleep and whose innermost Python frame belongs to torch waits for another process. If every
rank that has not reached the end of the cell is blocked like this, or waits according to its status, no rank is left
that could end these waits. A rank that computes has a runnable thread; one that calls `time.sleep`, reads a file or
waits for a child process has another innermost frame.
"""

import os
import re
import time
from pathlib import Path

import torch

import minidist.comm
import minidist.tools.shm
from minidist.tools import torch_group
from minidist.tools.launch.live_job import LiveJob

BLOCKED_S = 0.5
# torch sleeps and retries while it connects to a store, and gloo sleeps 10 ms for each connection of a destroyed group.
_RESUMES_ITSELF = re.compile(r"rendezvous\.py |\bdestroy(_process_group)?$")
_PACKAGES = (torch, minidist.comm, minidist.tools.shm)
_BLOCKING_FOLDERS = (
    *(os.path.dirname(os.path.abspath(package.__file__)) + os.sep for package in _PACKAGES),
    os.path.abspath(torch_group.__file__),
)


class BlockedRankDetector:
    """Detects that every rank that still runs a cell is blocked inside torch, so that the cell cannot end."""

    def __init__(self, job: LiveJob):
        self._job, self._last_check_time = job, 0.0

    def all_ranks_blocked(self, last_change_time: float) -> bool:
        """Return whether every rank that still runs the cell is blocked in torch. Each rank is checked twice.

        last_change_time: the `time.monotonic()` at which a rank's status last changed. The result is False until
        `BLOCKED_S` seconds later, and for `BLOCKED_S` seconds after each check.
        """
        now = time.monotonic()
        if now - max(last_change_time, self._last_check_time) < BLOCKED_S:
            return False
        if not self._all_unanswered_sleep():
            self._last_check_time = now
            return False
        snapshots = self._job.last_snapshots()
        hidden = [n for n in self._unanswered_ranks() if n not in snapshots or snapshots[n].state != "waiting"]
        stacks = self._job.dump_stacks() if hidden else {}
        self._last_check_time = time.monotonic()
        return bool(hidden) and all(_is_in_torch(stacks.get(n, "")) for n in hidden) and self._all_unanswered_sleep()

    def _unanswered_ranks(self) -> list[int]:
        """Return the ranks that have not answered the request: they still run the cell."""
        return [n for n in range(self._job.size) if n not in self._job.answers]

    def _all_unanswered_sleep(self) -> bool:
        """Return whether all threads of all ranks that still run the cell sleep."""
        return all(_all_threads_sleep(self._job.pids[n]) for n in self._unanswered_ranks())


def _all_threads_sleep(pid: int) -> bool:
    """Return whether every thread of the process sleeps; False where there is no /proc."""
    states = []
    try:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    except OSError:  # a thread has just ended
        return False
    return bool(states) and set(states) == {"S"}


def _is_in_torch(stack: str) -> bool:
    """Return whether the innermost Python frame of a stack waits inside torch, and for another process."""
    innermost = re.search(r'File "([^"]+)", line \d+ in (\w+)', stack)
    return (
        bool(innermost)
        and innermost[1].startswith(_BLOCKING_FOLDERS)
        and not _RESUMES_ITSELF.search(" ".join(innermost.groups()))
    )
