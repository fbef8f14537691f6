"""Hung ranks: those that are stopped or go on computing while others wait for them.

The state of a process comes from /proc. A rank that computes may merely be slow (a first compilation, an evaluation),
so it is only named; it is killed after the hang limit.
"""

import sys
import threading
from collections.abc import Mapping

from minidist.errors import format_ranks
from minidist.tools.deadlock.caller import find_user_code_line
from minidist.tools.deadlock.detector import Wait
from minidist.tools.deadlock.status_report import shorten_location

ASK_S = 2.0  # after which a rank that others wait for is asked what it does
NOTICE_S = 10.0  # after which it is named; at once if it is stopped
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
    """Measures for how long others have waited for each running rank."""

    def __init__(self):
        self._since_s: dict[tuple[int, Wait], float] = {}

    def update(self, awaited: Mapping[int, Mapping[Wait, list[int]]], now_s: float) -> dict[int, float]:
        """Return, for each running rank that others wait for, the seconds since that began.

        awaited: from `find_awaited_ranks`, of statuses read at `now_s`.
        """
        keys = [(rank, wait) for rank, waits in awaited.items() for wait in waits]
        self._since_s = {key: self._since_s.get(key, now_s) for key in keys}
        waited_s: dict[int, float] = {}
        for (rank, _), since_s in self._since_s.items():
            waited_s[rank] = max(now_s - since_s, waited_s.get(rank, 0.0))
        return waited_s


def default_hang_limit_s(timeout_s: float) -> float:
    """Return the hang limit for operations that may take `timeout_s`: it ends the hung rank before they all fail."""
    return 0.9 * timeout_s


def describe_hang(rank: int, process: str | None, line: str | None, waited_s: float, waiting: list[int]) -> str:
    """Return the line of text that names a hung rank.

    process: the state of its process, None if unknown. line: what its main thread runs, None if it did not answer.
    waited_s: for how long the ranks `waiting` have waited for it.
    """
    what = process if process == STOPPED or line is None else f"running at {shorten_location(line)}"
    what = what or "it does not answer"
    return f"rank {rank} keeps others waiting: {what}; {describe_wait(waited_s, waiting)}"


def waiting_ranks(waits: Mapping[Wait, list[int]]) -> list[int]:
    """Return the ranks that wait in any of these operations, ascending."""
    return sorted({rank for ranks in waits.values() for rank in ranks})


def describe_wait(waited_s: float, waiting: list[int]) -> str:
    """Return in words for how long which ranks have waited."""
    verb = "has" if len(waiting) == 1 else "have"
    return f"{format_ranks(waiting)} {verb} waited for it for {waited_s:.0f} s"
