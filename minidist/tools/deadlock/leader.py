"""The leader: the one waiting rank that reads the status of all ranks from the store and detects deadlocks.

A rank's facts (`RankFacts`) are the part of its status that detection needs; each rank posts its own in the store.

Ranks and leader exchange one record, which every waiting rank reads about once a second or more often:

* the leader suspects a deadlock from facts that may be out of date, and makes a request with the next number;
* every waiting rank posts its facts again with that number, and the few ranks in `ranks_to_post_page` their pages;
* a status that is the same in both readings was true when the request was made; the diagnosis uses only such statuses.

A running rank that others have waited for is asked for the line that it runs, and the ranks of its machine for the
state of its process: a stopped process cannot answer. After the hang limit the ranks of its machine kill it.
"""

import json
from dataclasses import replace
from typing import NamedTuple

from minidist.tools.deadlock.detector import (
    BLOCKED,
    ENDED,
    AwaitedOperation,
    Diagnosis,
    ReportDelay,
    Status,
    detect_deadlock,
    find_awaited_ranks,
)
from minidist.tools.deadlock.facts import RankFacts, decode_facts
from minidist.tools.deadlock.hang import (
    ASK_S,
    NOTICE_S,
    STOPPED,
    HangTracker,
    describe_hang,
    describe_wait,
    waiting_ranks,
)
from minidist.tools.deadlock.status_page import StatusPage

_MAX_INTERVAL_S = 16.0  # between two questions about the same rank
_KILL_S = 5.0  # within which a killed rank must have ended
_MAX_ASKED = 4
_MAX_PAGES = 16
CHANGES = "changes"  # counts the posts of all ranks


class WatchRecord(NamedTuple):
    """The record in the store through which the leader (see `Leader`) asks all ranks for their status.

    leader: the leader's rank, None if there is none. heartbeat: a number that grows while the leader lives.
    request: number of the latest request, which every waiting rank answers with its `RankFacts`. ranks_to_post_page:
    the ranks that answer with their whole status page, too.
    question: number of the latest question, which asks what `asked_ranks` are doing. ranks_to_kill: hung ranks. Both
    lists have (rank, machine, process id): the other ranks of that machine look at the process, or kill it.
    """

    leader: int | None = None
    heartbeat: int = 0
    request: int = 0
    ranks_to_post_page: tuple = ()
    question: int = 0
    asked_ranks: tuple = ()
    ranks_to_kill: tuple = ()

    def to_text(self) -> str:
        """Return the record as JSON text for the store."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: bytes | str) -> "WatchRecord":
        """Return the record from the text that `to_text` made."""
        return cls(*json.loads(text))


class Leader:
    """Reads the status of all ranks from the store, and detects deadlocks and hung ranks. One waiting rank is leader.

    rank: this rank. size: the number of ranks. store: torch's store, used by no other thread. hang_limit_s: a running
    rank that others have awaited for this many seconds is killed. notes: lines of text about hung ranks, which the
    caller prints and clears.
    """

    def __init__(self, rank: int, size: int, store, hang_limit_s: float):
        self._rank, self._size, self._store, self._hang_limit_s = rank, size, store, hang_limit_s
        self._keys = [facts_key(r) for r in range(size)]
        self._facts: dict[int, RankFacts] = {}
        self._suspicion: Diagnosis | None = None
        self._awaited: dict[int, dict[AwaitedOperation, list[int]]] = {}
        self._seen_changes = -1
        self._suspected: Diagnosis | None = None
        self._versions: dict[int, int] = {}  # of the suspected ranks, when the request was made
        self._report_delay = ReportDelay()
        self._hangs, self._noted = HangTracker(), set()
        self._next_question_s, self._question_interval_s = float("-inf"), ASK_S
        self._kill_times: dict[int, float] = {}
        self.notes: list[str] = []

    def poll(self, record: WatchRecord, now_s: float) -> tuple[WatchRecord, Diagnosis | None]:
        """Read the `RankFacts` that changed in the store; return the new record, and a diagnosis if the run is stuck.

        The caller writes the record, with requests to the ranks, to the store. The diagnosis is None until a deadlock
        or mismatch is confirmed, or a killed rank does not end. record: the record that is in the store. now_s:
        `time.monotonic()`.
        """
        record = record._replace(heartbeat=record.heartbeat + 1)
        changes = self._store.add(CHANGES, 0)
        ranks = range(self._size) if changes != self._seen_changes else [rank for rank, *_ in record.asked_ranks]
        if not self._facts and not self._store.check(self._keys):  # a rank has not posted yet
            return record, None
        data = self._store.multi_get([self._keys[rank] for rank in ranks]) if ranks else []
        read = {rank: decode_facts(bytes(facts)) for rank, facts in zip(ranks, data, strict=True)}
        if any(self._facts.get(rank) != facts for rank, facts in read.items()):
            self._facts |= read
            self._suspicion, self._awaited = detect_deadlock(self._facts), find_awaited_ranks(self._facts)
        self._seen_changes = changes
        record, diagnosis = self._find_deadlock(record, now_s)
        if diagnosis is None:
            record, diagnosis = self._watch_hangs(record, now_s)
        return record, diagnosis

    def _find_deadlock(self, record: WatchRecord, now_s: float) -> tuple[WatchRecord, Diagnosis | None]:
        """Confirm or drop a suspected deadlock; return the new record, and the diagnosis once it is confirmed.

        The first call for a suspicion makes a request; the next ones compare the ranks' answers with it.
        """
        suspected = self._suspicion
        if suspected is None:
            self._suspected, self._report_delay = None, ReportDelay()
            return record, None
        if self._suspected is None or suspected.ranks != self._suspected.ranks or self._has_moved(record):
            self._suspected = suspected
            involved = {*suspected.ranks, *suspected.involved_ranks}
            self._versions = {r: f.version for r, f in self._facts.items() if f.state in BLOCKED}
            pages = self._choose_pages(suspected, involved)
            return record._replace(request=record.request + 1, ranks_to_post_page=tuple(pages)), None
        confirmed = {
            rank: facts
            for rank, facts in self._facts.items()
            if facts.state in ENDED or (facts.request == record.request and self._versions.get(rank) == facts.version)
        }
        diagnosis = self._report_delay.release_if_due(detect_deadlock(confirmed), confirmed, range(self._size), now_s)
        return record, diagnosis and (detect_deadlock(self._with_texts(confirmed, diagnosis, record)) or diagnosis)

    def _has_moved(self, record: WatchRecord) -> bool:
        """Return whether a rank's status changed between the suspicion and its answer: then the request is repeated."""
        return any(
            self._facts[rank].request == record.request and self._facts[rank].version != self._versions.get(rank)
            for rank in self._suspected.ranks
            if self._facts[rank].state in BLOCKED
        )

    def _choose_pages(self, suspected: Diagnosis, involved: set[int]) -> list[int]:
        """Return the ranks that must post their pages for the report: one for each distinct text that it needs."""
        if suspected.kind == "mismatch":
            return list(suspected.ranks)
        ranks: dict[bytes, int] = {}
        for rank in sorted(involved):
            if self._facts[rank].state in BLOCKED:
                ranks.setdefault(self._facts[rank].text_hash, rank)
        return list(ranks.values())[:_MAX_PAGES]

    def _with_texts(
        self, confirmed: dict[int, RankFacts], diagnosis: Diagnosis, record: WatchRecord
    ) -> dict[int, Status]:
        """Return the status of each rank in `confirmed`, with the texts of the posted status pages filled in."""
        ranks = [
            rank
            for rank in record.ranks_to_post_page
            if rank in confirmed and self._store.check([status_page_key(rank)])
        ]
        pages = self._store.multi_get([status_page_key(rank) for rank in ranks]) if ranks else []
        snapshots = {rank: StatusPage.read_snapshot(bytes(page)) for rank, page in zip(ranks, pages, strict=True)}
        if diagnosis.kind == "mismatch":
            return confirmed | snapshots
        texts = {confirmed[rank].text_hash: (s.wait_operation, s.wait_location) for rank, s in snapshots.items()}
        return {
            rank: replace(facts, wait_operation=texts[facts.text_hash][0], wait_location=texts[facts.text_hash][1])
            if facts.text_hash in texts
            else facts
            for rank, facts in confirmed.items()
        }

    def _watch_hangs(self, record: WatchRecord, now_s: float) -> tuple[WatchRecord, Diagnosis | None]:
        """Ask what long-awaited running ranks are doing, and have hung ones killed after the hang limit.

        Returns the new record, and a diagnosis if a killed rank does not end.
        """
        waited_s = self._hangs.seconds_awaited(self._awaited, now_s)
        self._noted = {(rank, what) for rank, what in self._noted if rank in waited_s}
        self._kill_times = {rank: since_s for rank, since_s in self._kill_times.items() if rank in waited_s}
        suspects = sorted(rank for rank, seconds in waited_s.items() if seconds >= ASK_S)[:_MAX_ASKED]
        if not suspects:
            return record._replace(asked_ranks=(), ranks_to_kill=()), None
        for rank, *_ in record.asked_ranks:
            if rank in suspects:
                self._note_hang(rank, record.question, waited_s[rank])
        if now_s >= self._next_question_s:
            self._question_interval_s = (
                min(2 * self._question_interval_s, _MAX_INTERVAL_S) if record.asked_ranks else ASK_S
            )
            self._next_question_s = now_s + self._question_interval_s
            asked = tuple((rank, *self._facts[rank].location) for rank in suspects)
            record = record._replace(question=record.question + 1, asked_ranks=asked)
        too_long = [rank for rank in suspects if waited_s[rank] >= self._hang_limit_s]
        for rank in too_long:
            wait = describe_wait(waited_s[rank], waiting_ranks(self._awaited[rank]))
            if rank not in self._kill_times:
                self._kill_times[rank] = now_s
                self.notes.append(f"rank {rank} is killed: {wait}")
            elif now_s - self._kill_times[rank] >= _KILL_S:
                return record, Diagnosis("hang", (rank,), f"rank {rank} does not end although it was killed: {wait}")
        return record._replace(ranks_to_kill=tuple((rank, *self._facts[rank].location) for rank in too_long)), None

    def _note_hang(self, rank: int, question: int, waited_s: float) -> None:
        """Add a note on what an awaited rank is doing: at once if it is stopped, else after NOTICE_S. Once for each.

        question: number of the question that the rank has answered. waited_s: how long others have waited for it.
        """
        answers = {}
        for key in (process_state_key(rank), main_thread_line_key(rank)):
            if self._store.check([key]):
                number, _, text = bytes(self._store.get(key)).decode().partition(" ")
                answers[key] = text if int(number) >= question - 1 else None
        process, line = answers.get(process_state_key(rank)), answers.get(main_thread_line_key(rank))
        is_stopped = process == STOPPED
        if (rank, is_stopped) in self._noted or not (is_stopped or waited_s >= NOTICE_S):
            return
        self._noted.add((rank, is_stopped))
        self.notes.append(describe_hang(rank, process, line, waited_s, waiting_ranks(self._awaited[rank])))


def facts_key(rank: int) -> str:
    """Return the store key under which a rank posts its `RankFacts`, the short form of its status."""
    return f"status/{rank}"


def status_page_key(rank: int) -> str:
    """Return the store key under which a rank posts its whole status page when the leader requests the page."""
    return f"page/{rank}"


def process_state_key(rank: int) -> str:
    """Return the store key of the state of a rank's process, posted on request by another rank of the same machine."""
    return f"process/{rank}"


def main_thread_line_key(rank: int) -> str:
    """Return the store key of the "file:line" that a rank's main thread runs, posted on request by the rank."""
    return f"line/{rank}"
