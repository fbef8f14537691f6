"""Deadlock detection for ranks that no parent process watches.

A thread per rank exchanges facts (the rank's status in a compact encoding, see `facts.py`) through torch's store. While
its rank runs, it reads one record every second or less often. Once its rank has waited for half a second it posts the
rank's facts, and again only when they have changed; one of the waiting ranks is the leader (`leader.py`). So a rank's
cost does not depend on the number of ranks, and the store's work grows linearly with it: the time between two readings
grows, too, which keeps the store at a tenth of one core. `python -m bench watch` measures both.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from minidist.tools.deadlock.facts import ProcessLocation, encode_facts
from minidist.tools.deadlock.hang import default_hang_limit_s, describe_process, find_main_thread_line
from minidist.tools.deadlock.leader import (
    CHANGES,
    Leader,
    WatchRecord,
    facts_key,
    main_thread_line_key,
    process_state_key,
    status_page_key,
)
from minidist.tools.deadlock.status_page import StatusPage
from minidist.tools.deadlock.status_report import describe_ranks

TICK_S = 0.1  # between two looks at the status of this rank, which is in its own memory
_QUIET_S = 0.5
_READ_S = 250e-6  # per rank of the job: the least time between two readings of the store
_READ_RUNNING_S = 1.0
_LEADER_LOST_S = 1.0
_RECORD = "record"


class WatchParticipant:
    """One rank's part in the deadlock detection through torch's store. It has no thread: call `tick` every TICK_S.

    While they wait for an operation, ranks post their status in short (`RankFacts`), and one of them, the leader, looks
    for deadlocks and hung ranks. Arguments as for `Watchdog`, but `hang_limit_s` is not None.
    Attributes: period_s, the seconds between two readings of the store (a tick between them does nothing); notes, lines
    of text about ranks that keep others waiting, which the caller prints and clears.
    """

    def __init__(
        self, rank: int, size: int, status: StatusPage, store, node: int, timeout_s: float, hang_limit_s: float
    ):
        self.rank, self.size, self._status, self._store = rank, size, status, store
        self._timeout_s, self._hang_limit_s = timeout_s, hang_limit_s
        self._location = ProcessLocation(node, os.getpid())
        self.period_s = max(TICK_S, size * _READ_S)
        self._version, self._since_s, self._next_reading_s = -1, 0.0, float("-inf")
        self._has_posted_wait = False
        self._record_text, self._record_since_s = "", 0.0
        self._leader: Leader | None = None
        self._answered = self._question = 0
        self._killed: set[int] = set()
        self.notes: list[str] = []
        status.track_pending_operations()
        store.compare_set(_RECORD, "", WatchRecord().to_text())
        self.post()

    def tick(self, now_s: float) -> str | None:
        """Do what is due at time `now_s` (`time.monotonic()`); return a report as text if the run can never proceed.

        Otherwise returns None. This posts the rank's `RankFacts` (its status in short) when the rank begins or ends a
        wait, and reads the store if that is due. A rank that waits may answer the leader's requests or become the
        leader. A rank of the machine of a hung rank may kill it.
        """
        version = self._status.poll_pending_and_get_version()
        if version != self._version:
            self._version, self._since_s = version, now_s
            if self._has_posted_wait:  # what the others know is out of date
                self._has_posted_wait = False
                self._resign()
                self.post()
        waited_s = now_s - self._since_s
        is_blocked = self._status.is_blocked and waited_s >= _QUIET_S
        if is_blocked and not self._has_posted_wait:
            self._has_posted_wait = True
            self.post()
            spread_s = self.period_s * self.rank / self.size  # ranks that began to wait together read one by one
            self._next_reading_s = min(self._next_reading_s, now_s + spread_s)
        if is_blocked and waited_s > self._timeout_s:
            mine = {self.rank: self._status.take_snapshot()}
            return "\n".join([f"after {self._timeout_s:g} s in one wait", *describe_ranks(mine)])
        if now_s < self._next_reading_s:
            return None
        self._next_reading_s = now_s + (self.period_s if is_blocked else max(self.period_s, _READ_RUNNING_S))
        text = bytes(self._store.get(_RECORD)).decode()
        if text != self._record_text:
            self._record_text, self._record_since_s = text, now_s
        record = WatchRecord.from_text(text)
        self._answer(record, is_blocked)
        return self._lead_or_elect(record, now_s) if is_blocked else None

    def post(self, is_change: bool = True) -> None:
        """Write this rank's status in short (`RankFacts`) to the store.

        is_change: tell the leader that this status has changed, so that it reads the status of all ranks again.
        """
        while (snapshot := self._status.take_snapshot()) is None:  # the rank is writing
            time.sleep(1e-3)
        facts = encode_facts(snapshot, self._location, self._answered)
        self._store.set(facts_key(self.rank), facts)
        if is_change:
            self._store.add(CHANGES, 1)

    def _resign(self) -> None:
        """Stop being the leader, if this rank is, so that a waiting rank takes over."""
        if self._leader is not None:
            self._leader = None
            record = WatchRecord.from_text(self._record_text)
            self._store.compare_set(_RECORD, self._record_text, record._replace(leader=None).to_text())

    def _answer(self, record: WatchRecord, is_blocked: bool) -> None:
        """Answer the leader's latest request and question, once each. is_blocked: whether this rank waits."""
        if record.request != self._answered and is_blocked:
            if self.rank in record.ranks_to_post_page:
                self._store.set(status_page_key(self.rank), self._status.to_bytes())
            self._answered = record.request
            self.post()
        if record.question != self._question:
            self._question = record.question
            for rank, node, pid in record.asked_ranks:
                if rank == self.rank:
                    self._store.set(main_thread_line_key(rank), f"{record.question} {find_main_thread_line()}")
                    self.post(is_change=False)
                elif node == self._location.node and (state := describe_process(pid)):
                    self._store.set(process_state_key(rank), f"{record.question} {state}")
        for rank, node, pid in record.ranks_to_kill:
            if node == self._location.node and rank not in self._killed:
                self._killed.add(rank)
                os.kill(pid, signal.SIGKILL)

    def _lead_or_elect(self, record: WatchRecord, now_s: float) -> str | None:
        """As the leader, poll the ranks and write the record; without a living leader, become the leader.

        Returns the report of a diagnosis as text, else None.
        """
        diagnosis = None
        if record.leader == self.rank and self._leader is not None:
            new, diagnosis = self._leader.poll(record, now_s)
            self.notes += self._leader.notes
            self._leader.notes.clear()
        elif record.leader is None or now_s - self._record_since_s > max(_LEADER_LOST_S, 3 * self.period_s):
            new = record._replace(leader=self.rank, heartbeat=record.heartbeat + 1)
        else:
            self._leader = None
            return None
        text = new.to_text()
        if bytes(self._store.compare_set(_RECORD, self._record_text, text)).decode() != text:
            self._leader = None  # another rank was faster
            return None
        self._record_text, self._record_since_s = text, now_s
        if self._leader is None:
            self._leader = Leader(self.rank, self.size, self._store, self._hang_limit_s)
        self._answer(new, True)
        return diagnosis and str(diagnosis)


class Watchdog:
    """A thread of this rank that detects deadlocks and hung ranks, together with the watchdogs of all other ranks.

    For ranks under torchrun, which no parent process watches. The constructor starts the thread.
    rank, size: this rank and the number of ranks. status: the status page of this rank. store: a connection to torch's
    store for this thread alone, because a blocking call on a shared connection would block the rank as well. node:
    index of this machine. timeout_s: a wait of more seconds than this is reported even if no deadlock is detected.
    hang_limit_s: a rank that other ranks have awaited for this many seconds, while it runs or is stopped, is killed;
    None: nine tenths of timeout_s.
    on_report: called once, in the thread, with the report as text if the run can never proceed; None: print the report
    and end this process with exit code 1. on_note: called, in the thread, with each line of text about a rank that
    keeps others waiting; None: print the line to stderr.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        status: StatusPage,
        store,
        *,
        node: int = 0,
        timeout_s: float = 1800.0,
        hang_limit_s: float | None = None,
        on_report: Callable[[str], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ):
        limit_s = default_hang_limit_s(timeout_s) if hang_limit_s is None else hang_limit_s
        self._participant = WatchParticipant(rank, size, status, store, node, timeout_s, limit_s)
        self._size, self._store, self._timeout_s = size, store, timeout_s
        self._on_report, self._on_note = on_report or _end_process, on_note or _print_note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def wait_until_all_ranks_end(self) -> None:
        """Stop the thread, post this rank's final status, and wait until all ranks have called this method. Collective.

        Waits at most `timeout_s`. If this rank closed its connections at once, a rank that still waits for it would
        report a network error.
        """
        self.stop()
        self._participant.post()
        self._store.add("ended", 1)
        end_s = time.monotonic() + self._timeout_s
        while self._store.add("ended", 0) < self._size and time.monotonic() < end_s:
            time.sleep(self._participant.period_s)

    def stop(self) -> None:
        """Stop the watchdog thread and wait until it has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        """Call `tick` every TICK_S, in a thread of its own, until the run ends or cannot proceed."""
        while not self._stop.wait(TICK_S):
            try:
                report = self._participant.tick(time.monotonic())
            except RuntimeError:  # the store has ended, and the run with it: the ranks report that themselves
                return
            for note in self._participant.notes:
                self._on_note(note)
            self._participant.notes.clear()
            if report is not None and not self._stop.is_set():
                self._on_report(report)
                return


def _print_note(note: str) -> None:
    """Print a note on stderr."""
    print(note, file=sys.stderr, flush=True)


def _end_process(report: str) -> None:
    """Print the report on stderr and end this process at once, with exit code 1."""
    print(report, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
