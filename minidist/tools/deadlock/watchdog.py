"""Deadlock detection for ranks that no parent process watches."""

import os
import struct
import sys
import threading
import time
from collections.abc import Callable

from minidist.tools.deadlock.detector import ENDED, ReportDelay, Verdict, detect_deadlock
from minidist.tools.deadlock.status_page import Snapshot, StatusPage
from minidist.tools.deadlock.status_report import describe_ranks

_PERIOD_S = 0.1
_QUIET_S = 0.5


class Watchdog:
    """A thread that exchanges the status of ranks through a store, for ranks without a watching parent (torchrun).

    Only a rank that has waited for more than half a second takes part: it posts its status with a counter a few times
    a second and reads those of the others. A status counts as unchanged if between two readings its counter has
    advanced and its content has not. The lowest waiting rank reports.

    status: of this rank. store: a connection to the store for this thread alone, because a blocking call on a shared
    connection would block the rank as well. timeout_s: also report a rank that has been in one wait for that long.
    on_report: called once, with the report as text; None: print the report and end the process with exit code 1.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        status: StatusPage,
        store,
        *,
        timeout_s: float = 1800.0,
        on_report: Callable[[str], None] | None = None,
    ):
        self._rank, self._status, self._store, self._timeout_s = rank, status, store, timeout_s
        self._keys = [f"status/{r}" for r in range(size)]
        self._on_report = on_report or _end_process
        self._post_count = 0
        self._last_readings: dict[int, tuple[int, Snapshot]] = {}
        self._report_delay = ReportDelay()
        self._stop = threading.Event()
        self._post()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def wait_until_all_ranks_end(self) -> None:
        """Stop the thread, post the final status of this rank, and wait until all other ranks have ended too.

        If this rank closed its connections at once, a rank that still waits for it would report a network error.
        """
        self.stop()
        self._post()
        self._store.add("ended", 1)
        end_s = time.monotonic() + self._timeout_s
        while self._store.add("ended", 0) < len(self._keys) and time.monotonic() < end_s:
            time.sleep(_PERIOD_S)

    def stop(self) -> None:
        """Stop the thread; wait until it has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        waiting_version, waiting_since_s = None, 0.0
        while not self._stop.wait(_PERIOD_S):
            snapshot, now_s = self._status.take_snapshot(), time.monotonic()
            if snapshot is None or snapshot.state != "waiting" or snapshot.version != waiting_version:
                waiting_version, waiting_since_s = snapshot and snapshot.version, now_s
                continue
            report = None
            if now_s - waiting_since_s > self._timeout_s:
                report = "\n".join(
                    [f"after {self._timeout_s:g} s in one wait", *describe_ranks({self._rank: snapshot})]
                )
            elif now_s - waiting_since_s > _QUIET_S:
                try:
                    self._post()
                    report = self._read()
                except RuntimeError:  # the store has ended, and the run with it: the ranks report that themselves
                    return
            if report is not None and not self._stop.is_set():
                self._on_report(str(report))
                return

    def _post(self) -> None:
        self._post_count += 1
        self._store.set(self._keys[self._rank], struct.pack("<Q", self._post_count) + self._status.to_bytes())

    def _read(self) -> Verdict | None:
        if not self._store.check(self._keys):  # a rank has not posted yet
            return None
        readings = {}
        for rank, data in enumerate(self._store.multi_get(self._keys)):
            snapshot = StatusPage.read_snapshot(bytes(data)[8:])
            if snapshot is not None:
                readings[rank] = (struct.unpack_from("<Q", bytes(data))[0], snapshot)
        before, self._last_readings = self._last_readings, readings
        unchanged = {
            rank: snapshot
            for rank, (count, snapshot) in readings.items()
            if snapshot.state in ENDED or (rank in before and before[rank][1] == snapshot and before[rank][0] < count)
        }
        waiting = [rank for rank, snapshot in unchanged.items() if snapshot.state == "waiting"]
        verdict = detect_deadlock(unchanged) if waiting and min(waiting) == self._rank else None
        return self._report_delay.release_if_due(verdict, unchanged, range(len(self._keys)), time.monotonic())


def _end_process(report: str) -> None:
    print(report, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
