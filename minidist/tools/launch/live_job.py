"""The client's side of live ranks: send a request to all of them and watch while they answer."""

import signal
from typing import Any

from minidist.tools.deadlock.detector import ENDED, Diagnosis
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.launch.failure_report import report_deaths
from minidist.tools.launch.job import Job
from minidist.tools.launch.rank_handle import RankHandle


class LiveJob(Job):
    """A job whose ranks stay alive and answer requests until they are killed. It detects deadlocks but kills no rank.

    Arguments as for `Job`. answers: the answer of each rank that has answered the latest request, by rank. diagnosis: a
    detected deadlock or mismatch of operations, because of which ranks cannot answer; None if there is none.
    """

    def __init__(self, *args, **kwargs):
        self.answers: dict[int, Any] = {}
        self.diagnosis: Diagnosis | None = None
        self._request_number = 0
        super().__init__(*args, **kwargs)

    def send_request(self, message: Any) -> None:
        """Send a request, any picklable object, to every living rank; discard earlier answers and output.

        All ranks must have answered the previous request. `poll` collects the answers in `answers`.
        """
        self._request_number += 1
        self.answers, self.diagnosis = {}, None
        for rank in self._ranks:
            rank.answers.clear()
            rank.clear_output()
            if not rank.has_ended:
                rank.send_message((self._request_number, message))

    @property
    def ranks(self) -> list[RankHandle]:
        """The `RankHandle` of each rank, in rank order."""
        return self._ranks

    @property
    def all_answered(self) -> bool:
        """Whether every rank has answered the latest request."""
        return len(self.answers) == self.size

    @property
    def dead_ranks(self) -> list[int]:
        """The ranks whose processes have died; all ranks if the job has ended because the rank server died."""
        return [n for n, rank in enumerate(self._ranks) if rank.has_died or self.has_ended]

    def status_snapshots(self) -> list[Snapshot | None]:
        """Return the current status of each rank in the latest request, in rank order.

        None for a rank that is just updating its status, or whose status is still that of the previous request.
        """
        seen = super().status_snapshots()
        return [None if s and s.state in ENDED and n not in self.answers else s for n, s in enumerate(seen)]

    def last_snapshots(self) -> dict[int, Snapshot]:
        """Return the last status of each rank, by rank; ranks that are just updating their status are left out."""
        return {n: s for n, s in enumerate(super().status_snapshots()) if s is not None}

    def describe_deaths(self) -> str:
        """Return a report of which ranks died, why, and what the other ranks were doing."""
        return str(self._failure or report_deaths(self._ranks, super().status_snapshots()))

    def interrupt_ranks(self, close_connections: bool = False) -> None:
        """Send SIGINT, as Ctrl-C does, to the ranks that have not answered the latest request.

        close_connections: also make these ranks close their connections, because a rank blocked in torch ignores
        SIGINT.
        """
        for number in set(range(self.size)) - self.answers.keys():
            self.send_signal(signal.SIGINT, number)
            if close_connections:
                self.send_signal(signal.SIGUSR2, number)

    def drain_output(self) -> None:
        """Read all output that ranks have written so far into their handles, for instance after they have answered."""
        for rank in [] if self.has_ended else self._ranks:
            while rank.output_fd is not None and rank.read_output() and not rank.dropped_bytes:
                pass

    def _check_progress(self, now_s: float) -> None:
        """Collect the answers that have arrived, and look for a deadlock if a reading is due."""
        for number, rank in enumerate(self._ranks):
            for number_answered, answer in rank.answers:
                if number_answered == self._request_number:
                    self.answers[number] = answer
        if self._detector.seconds_until_next_reading(now_s) == 0.0:
            diagnosis = self._detector.update(dict(enumerate(self.status_snapshots())), now_s)
            self.diagnosis = self.diagnosis or diagnosis
