"""Deadlock detection for ranks that no parent process watches."""

import os
import struct
import sys
import threading
import time
from collections.abc import Callable

from minidist.tools.deadlock.detector import ENDED, Confirmation, Verdict, detect_deadlock
from minidist.tools.deadlock.status_page import Snapshot, StatusPage
from minidist.tools.deadlock.status_report import describe_ranks

_PERIOD_S = 0.1
_QUIET_S = 0.5


class Watchdog:
    """A thread that exchanges the status of ranks through a store, for ranks without a watching parent (torchrun).

    Only a rank that has waited for more than half a second takes part: it posts its status with a counter a few times
    a second and reads those of the others. A status counts as unchanged if between two readings its counter has
    advanced and its content has not. The lowest waiting rank reports.

    store: a connection of its own, because a blocking call on a shared one would block the rank as well.
    timeout_s: end the process as well after that long in one wait. end: what to do with the report; by default print it
    and end the process with exit code 1.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        status: StatusPage,
        store,
        *,
        timeout_s: float = 1800.0,
        end: Callable[[str], None] | None = None,
    ):
        self._rank, self._status, self._store, self._timeout_s = rank, status, store, timeout_s
        self._keys = [f"status/{r}" for r in range(size)]
        self._end = end or _end_process
        self._beat = 0
        self._seen: dict[int, tuple[int, Snapshot]] = {}
        self._confirmation = Confirmation()
        self._stop = threading.Event()
        self._post()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Post the final status of this rank, and wait until all other ranks have ended too.

        If its connections closed now, a rank that still waits for it would see a network error and not the reason.
        """
        self.stop()
        self._post()
        self._store.add("ended", 1)
        end_s = time.monotonic() + self._timeout_s
        while self._store.add("ended", 0) < len(self._keys) and time.monotonic() < end_s:
            time.sleep(_PERIOD_S)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        since, since_s = None, 0.0
        while not self._stop.wait(_PERIOD_S):
            snapshot, now_s = self._status.snapshot(), time.monotonic()
            if snapshot is None or snapshot.state != "waiting" or snapshot.version != since:
                since, since_s = snapshot and snapshot.version, now_s
                continue
            report = None
            if now_s - since_s > self._timeout_s:
                report = "\n".join(
                    [f"after {self._timeout_s:g} s in one wait", *describe_ranks({self._rank: snapshot})]
                )
            elif now_s - since_s > _QUIET_S:
                try:
                    self._post()
                    report = self._read()
                except RuntimeError:  # the store is gone: so is the run, and the ranks see that themselves
                    return
            if report is not None and not self._stop.is_set():
                self._end(str(report))
                return

    def _post(self) -> None:
        self._beat += 1
        self._store.set(self._keys[self._rank], struct.pack("<Q", self._beat) + self._status.image())

    def _read(self) -> Verdict | None:
        if not self._store.check(self._keys):  # a rank has not come this far
            return None
        seen = {}
        for rank, data in enumerate(self._store.multi_get(self._keys)):
            snapshot = StatusPage.read(bytes(data)[8:])
            if snapshot is not None:
                seen[rank] = (struct.unpack_from("<Q", bytes(data))[0], snapshot)
        before, self._seen = self._seen, seen
        stand = {
            rank: snapshot
            for rank, (beat, snapshot) in seen.items()
            if snapshot.state in ENDED or (rank in before and before[rank][1] == snapshot and before[rank][0] < beat)
        }
        waiting = [rank for rank, snapshot in stand.items() if snapshot.state == "waiting"]
        verdict = detect_deadlock(stand) if waiting and min(waiting) == self._rank else None
        return self._confirmation.confirm(verdict, stand, range(len(self._keys)), time.monotonic())


def _end_process(report: str) -> None:
    print(report, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
