"""Hung ranks: ranks that are stopped or go on computing while other ranks wait for them.

The state of a process comes from /proc. A rank that computes may merely be slow (a first compilation, an evaluation),
so it is only named at first, and killed only after others have waited for it for the hang limit, a number of seconds.
"""

import sys
import threading
from collections.abc import Mapping

from minidist.errors import format_ranks
from minidist.tools.deadlock.caller import find_user_code_line
from minidist.tools.deadlock.detector import AwaitedOperation
from minidist.tools.deadlock.status_report import shorten_location

ASK_S = 2.0  # seconds of waiting after which the awaited rank is asked which line it runs
NOTICE_S = 10.0  # seconds of waiting after which the awaited rank is named; a stopped rank is named after ASK_S
STOPPED = "stopped by a signal (SIGSTOP or SIGTSTP)"
_STATES = {"T": STOPPED, "t": "stopped by a debugger", "R": "running", "S": "sleeping", "D": "blocked in the system"}


def describe_process(pid: int) -> str | None:
    """Return the state of a process, such as "running" or "sleeping"; None if it has ended or /proc is missing."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return _STATES.get(letter)


def find_main_thread_line() -> str:
    """Return the line of the user's program that the main thread of this process is running, as "file:line"."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "an unknown line" if frame is None else find_user_code_line(frame)


class HangTracker:
    """Measures how long each running rank has kept other ranks waiting."""

    def __init__(self):
        self._since_s: dict[tuple[int, AwaitedOperation], float] = {}

    def seconds_awaited(
        self, waiters_by_awaited_rank: Mapping[int, Mapping[AwaitedOperation, list[int]]], now_s: float
    ) -> dict[int, float]:
        """Return, by rank, how many seconds other ranks have waited for each running rank that is awaited now.

        Call this after each reading of the ranks' status. waiters_by_awaited_rank: the result of `find_awaited_ranks`
        for the status read at `now_s` (`time.monotonic()`).
        """
        keys = [(rank, wait) for rank, waits in waiters_by_awaited_rank.items() for wait in waits]
        self._since_s = {key: self._since_s.get(key, now_s) for key in keys}
        waited_s: dict[int, float] = {}
        for (rank, _), since_s in self._since_s.items():
            waited_s[rank] = max(now_s - since_s, waited_s.get(rank, 0.0))
        return waited_s


def default_hang_limit_s(timeout_s: float) -> float:
    """Return how many seconds a rank may keep others waiting before it is killed, if the user sets no limit.

    This is nine tenths of `timeout_s`, the seconds after which a waiting operation fails.
    """
    return 0.9 * timeout_s


def describe_hang(rank: int, process: str | None, line: str | None, waited_s: float, waiting: list[int]) -> str:
    """Return a line of text that names a hung rank, what its process is doing, and the ranks that wait for it.

    process: the state of its process (see `describe_process`), None if unknown. line: the "file:line" that its main
    thread runs, None if the rank did not answer. waited_s: how many seconds the ranks `waiting` have waited.
    """
    what = process if process == STOPPED or line is None else f"running at {shorten_location(line)}"
    what = what or "it does not answer"
    return f"rank {rank} keeps others waiting: {what}; {describe_wait(waited_s, waiting)}"


def waiting_ranks(waits: Mapping[AwaitedOperation, list[int]]) -> list[int]:
    """Return all ranks that wait for one hung rank, ascending. waits: by operation, the ranks that wait in it."""
    return sorted({rank for ranks in waits.values() for rank in ranks})


def describe_wait(waited_s: float, waiting: list[int]) -> str:
    """Return text such as "ranks 0-2 have waited for it for 12 s". waiting: the waiting ranks."""
    verb = "has" if len(waiting) == 1 else "have"
    return f"{format_ranks(waiting)} {verb} waited for it for {waited_s:.0f} s"
