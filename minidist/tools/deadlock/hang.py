"""Hung ranks: ranks that are stopped or go on computing while other ranks wait for them.

The state of a process comes from /proc. A rank that computes may merely be slow (a first compilation, an evaluation),
so it is only named at first, and killed only after others have waited for it for the hang limit, a number of seconds.
"""

import sys
import threading
from collections.abc import Mapping

from minidist.errors import format_ranks
from minidist.tools.deadlock.caller import find_user_code_line
from minidist.tools.deadlock.detector import Wait
from minidist.tools.deadlock.status_report import shorten_location

ASK_S = 2.0  # seconds of waiting after which the awaited rank is asked which line it runs
NOTICE_S = 10.0  # seconds of waiting after which the awaited rank is named; a stopped rank is named after ASK_S
STOPPED = "stopped by a signal (SIGSTOP or SIGTSTP)"
_STATES = {"T": STOPPED, "t": "stopped by a debugger", "R": "running", "S": "sleeping", "D": "blocked in the system"}


def describe_process(pid: int) -> str | None:
    """Return the state of a process in words, such as "running"; None if it has ended or /proc does not show it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return _STATES.get(letter)


def find_main_thread_line() -> str:
    """Return the line of the user's program that the main thread of this process runs, as "file:line"."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "an unknown line" if frame is None else find_user_code_line(frame)


class HangTracker:
    """Measures for how long other ranks have waited for each running rank; call `update` after each reading."""

    def __init__(self):
        self._since_s: dict[tuple[int, Wait], float] = {}

    def update(self, awaited: Mapping[int, Mapping[Wait, list[int]]], now_s: float) -> dict[int, float]:
        """Return, for each running rank that others wait for, the seconds for which they have waited, by rank.

        awaited: from `find_awaited_ranks`, of statuses read at `now_s` (seconds of `time.monotonic`).
        """
        keys = [(rank, wait) for rank, waits in awaited.items() for wait in waits]
        self._since_s = {key: self._since_s.get(key, now_s) for key in keys}
        waited_s: dict[int, float] = {}
        for (rank, _), since_s in self._since_s.items():
            waited_s[rank] = max(now_s - since_s, waited_s.get(rank, 0.0))
        return waited_s


def default_hang_limit_s(timeout_s: float) -> float:
    """Return the default hang limit, nine tenths of `timeout_s`, the seconds after which an operation fails."""
    return 0.9 * timeout_s


def describe_hang(rank: int, process: str | None, line: str | None, waited_s: float, waiting: list[int]) -> str:
    """Return a line of text that names a hung rank, why it hangs, and the ranks that wait for it.

    process: the state of its process (`describe_process`), None if unknown. line: the "file:line" that its main thread
    runs, None if the rank did not answer. waited_s: seconds for which the ranks `waiting` have waited for it.
    """
    what = process if process == STOPPED or line is None else f"running at {shorten_location(line)}"
    what = what or "it does not answer"
    return f"rank {rank} keeps others waiting: {what}; {describe_wait(waited_s, waiting)}"


def waiting_ranks(waits: Mapping[Wait, list[int]]) -> list[int]:
    """Return all ranks that wait, ascending. waits: for each operation, the ranks that wait for it."""
    return sorted({rank for ranks in waits.values() for rank in ranks})


def describe_wait(waited_s: float, waiting: list[int]) -> str:
    """Return a text such as "ranks 0-2 have waited for it for 12 s"."""
    verb = "has" if len(waiting) == 1 else "have"
    return f"{format_ranks(waiting)} {verb} waited for it for {waited_s:.0f} s"
