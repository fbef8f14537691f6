"""Ends a process when its parent ends."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PERIOD_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Arrange that this process is killed when its parent ends: by prctl on Linux, elsewhere by a watching thread.

    parent_pid: process id of the expected parent; if it has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the request
        os._exit(1)


def _watch_parent(parent: int) -> None:
    """End this process once `parent` is no longer its parent; polls in a thread of its own."""
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
    os._exit(1)
