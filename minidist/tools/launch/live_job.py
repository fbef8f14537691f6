"""The client's side of live ranks: send a request to all of them and watch while they answer."""

import signal
from typing import Any

from minidist.tools.deadlock.detector import ENDED, Verdict
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.launch.failure_report import death_report
from minidist.tools.launch.job import Job
from minidist.tools.launch.remote_rank import RemoteRank


class LiveJob(Job):
    """A job whose ranks answer requests until they are killed. It detects deadlocks, but leaves ending to the caller.

    answers: the ranks' answers to the latest request, by rank. verdict: why the missing answers will never come.
    """

    def __init__(self, *args, **kwargs):
        self.answers: dict[int, Any] = {}
        self.verdict: Verdict | None = None
        self._asked = 0
        super().__init__(*args, **kwargs)

    def send_request(self, message: Any) -> None:
        """Send a message to every rank, once all have answered the one before."""
        self._asked += 1
        self.answers, self.verdict = {}, None
        for rank in self._ranks:
            rank.answers.clear()
            rank.clear_output()
            if not rank.has_ended:
                rank.send((self._asked, message))

    @property
    def ranks(self) -> list[RemoteRank]:
        """The client's view of each rank."""
        return self._ranks

    @property
    def all_answered(self) -> bool:
        """Whether every rank has answered the latest request."""
        return len(self.answers) == self.size

    @property
    def dead_ranks(self) -> list[int]:
        """The ranks that have died: all of them if the rank server has."""
        return [n for n, rank in enumerate(self._ranks) if rank.died or self.done]

    def status_snapshots(self) -> list[Snapshot | None]:
        """The status of each rank; None for one that still shows the end of its previous request."""
        seen = super().status_snapshots()
        return [None if s and s.state in ENDED and n not in self.answers else s for n, s in enumerate(seen)]

    def last_snapshots(self) -> dict[int, Snapshot]:
        """The last status of each rank, where it could be read."""
        return {n: s for n, s in enumerate(super().status_snapshots()) if s is not None}

    def describe_deaths(self) -> str:
        """Say which ranks died, how, and what the others were doing."""
        return str(self._failure or death_report(self._ranks, super().status_snapshots()))

    def interrupt(self, close_connections: bool = False) -> None:
        """Interrupt the ranks that have not answered, as Ctrl-C would.

        close_connections: also let ranks blocked in torch, which ignore the signal, close their connections.
        """
        for number in set(range(self.size)) - self.answers.keys():
            self.send_signal(signal.SIGINT, number)
            if close_connections:
                self.send_signal(signal.SIGUSR2, number)

    def drain_output(self) -> None:
        """Read the output that ranks wrote before they answered or died."""
        for rank in [] if self.done else self._ranks:
            while rank.output_fd is not None and rank.read_output() and not rank.dropped_bytes:
                pass

    def _decide(self, now_s: float) -> None:
        for number, rank in enumerate(self._ranks):
            for asked, answer in rank.answers:
                if asked == self._asked:
                    self.answers[number] = answer
        if self._detector.seconds_until_due(now_s) == 0.0:
            verdict = self._detector.update(dict(enumerate(self.status_snapshots())), now_s)
            self.verdict = self.verdict or verdict
