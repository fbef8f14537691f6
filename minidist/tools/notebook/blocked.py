"""Waits that rank status does not show, because they are inside torch: the end of DDP's backward, `new_group`.

A rank whose threads all sleep, and whose innermost Python frame is torch's own, waits for another process. When every
rank that has not reached the end of the cell does, or waits as its rank status shows, no rank can end these waits.
A rank that computes has a thread that runs, or would if it were its turn; one that sleeps by itself, reads or waits for
a process of its own has another frame innermost.
"""

import os
import re
import time
from pathlib import Path

import torch

import minidist.comm
import minidist.tools.shm
from minidist.tools.launch.live_job import LiveJob

STILL_S = 0.5
# While torch looks for its meeting point it sleeps and tries again by itself; and gloo sleeps for each connection of a
# group that is destroyed, 10 ms on an idle machine.
_ITSELF = re.compile(r"rendezvous\.py |\bdestroy(_process_group)?$")
_PACKAGES = (torch, minidist.comm, minidist.tools.shm)
_OWNERS = tuple(os.path.dirname(os.path.abspath(package.__file__)) + os.sep for package in _PACKAGES)


class Still:
    """Tells when all ranks of a job that have not answered wait inside torch, `STILL_S` after anything moved."""

    def __init__(self, job: LiveJob):
        self._job, self._since_s = job, 0.0

    def look(self, moved_s: float) -> bool:
        """Whether they do; nothing has moved since `moved_s`. Looks a second time before it says so."""
        now_s = time.monotonic()
        if now_s - max(moved_s, self._since_s) < STILL_S:
            return False
        if not self._asleep():
            self._since_s = now_s
            return False
        standing = self._job.last_snapshots()
        hidden = [n for n in self._pending() if n not in standing or standing[n].state != "waiting"]
        stacks = self._job.dump_stacks() if hidden else {}
        self._since_s = time.monotonic()
        return bool(hidden) and all(_in_torch(stacks.get(n, "")) for n in hidden) and self._asleep()

    def _pending(self) -> list[int]:
        return [n for n in range(self._job.size) if n not in self._job.answers]

    def _asleep(self) -> bool:
        return all(asleep(self._job.pids[n]) for n in self._pending())


def asleep(pid: int) -> bool:
    """Whether every thread of the process waits for something; False where /proc does not tell."""
    states = []
    try:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    except OSError:  # a thread has just ended
        return False
    return bool(states) and set(states) == {"S"}


def _in_torch(stack: str) -> bool:
    innermost = re.search(r'File "([^"]+)", line \d+ in (\w+)', stack)
    return bool(innermost) and innermost[1].startswith(_OWNERS) and not _ITSELF.search(" ".join(innermost.groups()))
