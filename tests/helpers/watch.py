"""Simulated ranks for the watchdog: one process, a virtual clock, a store in memory that counts its operations."""

import threading
from collections import Counter

from minidist.tools.deadlock.status_page import StatusPage
from minidist.tools.deadlock.watchdog import TICK_S, WatchParticipant


class Store(dict):
    """The part of torch's store that the watchdog uses."""

    def __init__(self):
        self.lock = threading.Lock()
        self.operations: Counter[str] = Counter()

    def set(self, key, value):
        self.operations["set"] += 1
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        self.operations["get"] += 1
        return self[key]

    def check(self, keys):
        self.operations["check"] += len(keys)
        return all(key in self for key in keys)

    def multi_get(self, keys):
        self.operations["multi_get"] += len(keys)
        return [self[key] for key in keys]

    def add(self, key, amount):
        self.operations["add"] += 1
        with self.lock:
            self[key] = dict.get(self, key, 0) + amount
            return self[key]

    def compare_set(self, key, expected, desired):
        self.operations["compare_set"] += 1
        with self.lock:
            if dict.get(self, key, b"") == expected.encode():
                self[key] = desired.encode()
            return self[key]


class SimulatedRanks:
    """Ranks whose status is set by hand in `pages`; `run` moves the clock and ticks all but those in `silent`.

    reports, notes: (virtual time, rank, text) of each.
    """

    def __init__(self, size, store=None, nodes=None, timeout_s=1800.0, hang_limit_s=1e9):
        self.store = Store() if store is None else store
        self.now_s, self.silent = 0.0, set()
        self.pages = [StatusPage() for _ in range(size)]
        for page in self.pages:
            page.on_resume()
        self.participants = [
            WatchParticipant(rank, size, page, self.store, nodes[rank] if nodes else 0, timeout_s, hang_limit_s)
            for rank, page in enumerate(self.pages)
        ]
        self.reports, self.notes = [], []

    def run(self, seconds: float, until_report: bool = True) -> str | None:
        """Tick until `seconds` have passed, or a rank reports; return the first report."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s = round(self.now_s + TICK_S, 6)
            for rank, participant in enumerate(self.participants):
                if rank in self.silent:
                    continue
                report = participant.tick(self.now_s)
                self.notes += [(self.now_s, rank, note) for note in participant.notes]
                participant.notes.clear()
                if report is not None:
                    self.reports.append((self.now_s, rank, report))
            if self.reports and until_report:
                return self.reports[0][2]
        return None

    def end(self, rank: int, state: str = "returned") -> None:
        """End a rank: it posts its last status, and its watchdog no longer runs."""
        self.pages[rank].record_end(state)
        self.participants[rank].post()
        self.silent.add(rank)
