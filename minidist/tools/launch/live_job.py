"""Ranks that live on, seen from the client: ask all of them something, watch while they answer."""

import signal
from typing import Any

from minidist.tools.deadlock.detector import ENDED, Verdict
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.launch.failure_report import death_report
from minidist.tools.launch.job import Job
from minidist.tools.launch.remote_rank import RemoteRank


class LiveJob(Job):
    """A job whose ranks take messages until they are killed. It judges as every job does; others decide the end.

    answers: what the ranks answered to the latest message, by rank. verdict: why those that did not never will.
    """

    def __init__(self, *args, **kwargs):
        self.answers: dict[int, Any] = {}
        self.verdict: Verdict | None = None
        self._asked = 0
        super().__init__(*args, **kwargs)

    def ask(self, message: Any) -> None:
        """Send a message to every rank. Only when all have answered the one before."""
        self._asked += 1
        self.answers, self.verdict = {}, None
        for rank in self._ranks:
            rank.answers.clear()
            rank.forget_output()
            if not rank.gone:
                rank.tell((self._asked, message))

    @property
    def ranks(self) -> list[RemoteRank]:
        return self._ranks

    @property
    def answered(self) -> bool:
        return len(self.answers) == self.size

    @property
    def died(self) -> list[int]:
        """The ranks that have died; all of them when the server has."""
        return [n for n, rank in enumerate(self._ranks) if rank.died or self.done]

    def boards(self) -> list[Snapshot | None]:
        """What each rank is doing. One that has not answered may still show the end of what it did before: None."""
        seen = super().boards()
        return [None if s and s.state in ENDED and n not in self.answers else s for n, s in enumerate(seen)]

    def standing(self) -> dict[int, Snapshot]:
        """What every rank is doing or did last, where it could be read."""
        return {n: s for n, s in enumerate(super().boards()) if s is not None}

    def death(self) -> str:
        """Who died, and where the others stood then."""
        return str(self._failure or death_report(self._ranks, super().boards()))

    def interrupt(self, cut: bool = False) -> None:
        """Stop what the ranks that have not answered are doing, as Ctrl-C would.

        cut: those that did not hear it wait inside torch; let them break their connections, which ends such a wait.
        """
        for number in set(range(self.size)) - self.answers.keys():
            self.signal(signal.SIGINT, number)
            if cut:
                self.signal(signal.SIGUSR2, number)

    def settle(self) -> None:
        """Take in what ranks that have answered or died had written before."""
        for rank in [] if self.done else self._ranks:
            while rank.output_fd is not None and rank.read_output() and not rank.dropped:
                pass

    def _decide(self, now_s: float) -> None:
        for number, rank in enumerate(self._ranks):
            for asked, answer in rank.answers:
                if asked == self._asked:
                    self.answers[number] = answer
        if self._observer.due_in_s(now_s) == 0.0:
            verdict = self._observer.see(dict(enumerate(self.boards())), now_s)
            self.verdict = self.verdict or verdict
