"""A rank must not outlive the process that started it."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PERIOD_S = 1.0


def die_with(parent: int) -> None:
    """Let the system kill this process when process `parent`, which started it, ends, however that ends.

    Linux does it by itself; elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_after, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before the system was told
        os._exit(1)


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
    os._exit(1)
