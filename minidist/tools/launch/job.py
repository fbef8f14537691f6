"""The client's side of one job: start its ranks, watch their status, collect results, detect failures."""

import contextlib
import mmap
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.tools.deadlock.detector import DeadlockDetector
from minidist.tools.deadlock.status_page import PAGE_BYTES, Snapshot, StatusPage
from minidist.tools.launch.failure import RankFailure
from minidist.tools.launch.failure_report import deadline_report, death_report, error_report
from minidist.tools.launch.remote_rank import RemoteRank

if TYPE_CHECKING:
    from minidist.tools.launch.client import RankServer

_GRACE_DIED_S = 0.15  # after a death, to report others that die of the same cause with it
_GRACE_RAISED_S = 1.0  # after an exception or sys.exit, for others that are about to do the same
_GRACE_END_S = 10.0  # after the last result, for processes to exit


@dataclass(frozen=True)
class Result:
    """values: what each rank returned. output: what each rank printed, stdout and stderr together, if captured."""

    values: list[Any]
    output: list[str]


class Job:
    """A running job. It makes progress on the client's side only while `poll` or `wait` runs."""

    def __init__(self, server: "RankServer", number: int, size: int, bootstrap: dict, capture: bool, deadline_s):
        self.size, self._server, self._number, self._deadline_s = size, server, number, deadline_s
        self._start_s = time.monotonic()
        self._detector = DeadlockDetector()
        self._failure: Exception | None = None
        self._first_s: dict[str, float] = {}  # when a rank was first seen to have died, or raised
        self._released_s: float | None = None
        self._zero_released = False
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RemoteRank] = []
        server._jobs[number] = self
        self._selector.register(server._connection.socket, selectors.EVENT_READ, self._hear_server)
        status_fd = create_shared_memory(PAGE_BYTES * size)
        self._pages = mmap.mmap(status_fd, PAGE_BYTES * size)
        self._launch(bootstrap, capture, status_fd)
        os.close(status_fd)

    # -- public interface ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, 0 for ranks that have not started yet."""
        return [rank.pid for rank in self._ranks]

    @property
    def done(self) -> bool:
        """Whether the job has ended and all its processes with it."""
        return self._number not in self._server._jobs

    def wait(self) -> Result:
        """Block until the job has ended; return the results. Raises as `RankServer.run`; Ctrl-C kills the ranks."""
        try:
            while not self.poll(1.0):
                pass
        except BaseException:
            self.kill()
            raise
        if self._failure is not None:
            raise self._failure
        return Result([pickle.loads(rank.payload) for rank in self._ranks], [rank.output for rank in self._ranks])

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Process events for at most `timeout_s`; return whether the job has ended (then `wait` does not block)."""
        if not self.done:
            judging = self._released_s is None
            self._pump(min(timeout_s, self._detector.seconds_until_due(time.monotonic()) if judging else timeout_s))
        if not self.done:
            self._decide(time.monotonic())
        return self.done

    def send_signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all if `rank` is None. May be called in a signal handler."""
        self._server._tell({"op": "signal", "job": self._number, "rank": rank, "signal": int(number)})

    def kill(self) -> None:
        """Kill all processes of the job and wait until they have ended."""
        self._end(RankFailure("killed", range(self.size), "the job was killed"))

    def status_snapshots(self) -> list[Snapshot | None]:
        """The status of each rank; None where it was just being written. Only while the job runs."""
        pages = memoryview(self._pages)
        return [StatusPage.read(pages[PAGE_BYTES * rank : PAGE_BYTES * (rank + 1)]) for rank in range(self.size)]

    def output(self, rank: int) -> str:
        """What one rank has printed so far."""
        return self._ranks[rank].output

    def dump_stacks(self, timeout_s: float = 0.5) -> dict[int, str]:
        """Request the Python stacks of the living ranks; return them by rank, innermost call first."""
        alive = {number: rank for number, rank in enumerate(self._ranks) if not rank.has_ended}
        for rank in alive.values():
            rank.clear_stack()
        self.send_signal(signal.SIGUSR1)
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not all(rank.stack_is_complete for rank in alive.values()):
            self._pump(0.02)
        return {number: rank.stack for number, rank in alive.items()}

    # -- implementation -----------------------------------------------------------------------------------------------

    def _launch(self, bootstrap: dict, capture: bool, status_fd: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()  # earlier output of this process must precede that of the ranks
        meeting = socket.create_server(("127.0.0.1", 0), backlog=max(128, self.size))
        for number in range(self.size):
            control, their_control = socket.socketpair()
            stack_fd, their_stack = os.pipe()
            output_fd, their_output = os.pipe() if capture else (None, None)
            rank = RemoteRank(control, output_fd, stack_fd)
            self._ranks.append(rank)
            self._listen(control, rank.read_control)
            self._listen(stack_fd, rank.read_stack)
            if capture:
                self._listen(output_fd, rank.read_output)
            streams = (their_output, their_output) if capture else (1, 2)
            fds = (*streams, their_control.fileno(), their_stack, status_fd)
            fds += (meeting.fileno(),) if number == 0 else ()
            self._server._tell({"op": "start", "job": self._number, "rank": number}, fds)
            their_control.close()
            os.close(their_stack)
            if capture:
                os.close(their_output)
        port = meeting.getsockname()[1]
        meeting.close()
        for number, rank in enumerate(self._ranks):
            rank.start({**bootstrap, "rank": number, "size": self.size, "port": port})

    def _listen(self, file, read) -> None:
        def take():
            if not read():
                self._selector.unregister(file)

        self._selector.register(file, selectors.EVENT_READ, take)

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if self.done:  # what the server said ended it
                return
            key.data()

    def _hear_server(self) -> None:
        if not self._server._receive():
            report = f"the rank server (process {self._server.pid}) died, and all ranks with it"
            self._finish(RankFailure("server", range(self.size), report))

    def _event(self, message: dict) -> None:
        """Handle the server's report that a rank has started or ended."""
        rank = self._ranks[message["rank"]]
        if message["event"] == "started":
            rank.pid = message["pid"]
        else:
            rank.mark_ended(message["code"])

    def _decide(self, now_s: float) -> None:
        if self._released_s is not None:
            return self._wind_up(now_s)
        due = self._detector.seconds_until_due(now_s) == 0.0
        verdict = self._detector.update(dict(enumerate(self.status_snapshots())), now_s) if due else None
        settled = all(rank.state != "running" or rank.has_ended for rank in self._ranks)
        if any(rank.died for rank in self._ranks):
            left = all(rank.state == "exit" for rank in self._ranks if rank.died)
            grace_s = _GRACE_RAISED_S if left else _GRACE_DIED_S
            if settled or now_s - self._since("died", now_s) >= grace_s:
                self._end(death_report(self._ranks, self.status_snapshots()))
        elif any(rank.error for rank in self._ranks):
            if settled or verdict or now_s - self._since("raised", now_s) >= _GRACE_RAISED_S:
                self._end(error_report(self._ranks, self.status_snapshots()))
        elif settled:
            self._release(now_s)
        elif verdict:
            self._end(RankFailure(verdict.kind, verdict.ranks, verdict.text))
        elif self._deadline_s is not None and now_s - self._start_s > self._deadline_s:
            self._end(deadline_report(self._deadline_s, self.status_snapshots(), self.dump_stacks()))

    def _since(self, what: str, now_s: float) -> float:
        return self._first_s.setdefault(what, now_s)

    def _release(self, now_s: float) -> None:
        """All ranks have returned: let them exit, rank 0, which serves the store, last."""
        self._released_s = now_s
        for rank in self._ranks[1:]:
            rank.allow_exit()
        self._wind_up(now_s)

    def _wind_up(self, now_s: float) -> None:
        if all(rank.has_ended for rank in self._ranks):
            self._finish(None)
        elif now_s - self._released_s > _GRACE_END_S:
            self._end(None)  # the results have arrived; kill processes that do not exit
        elif not self._zero_released and all(rank.has_ended for rank in self._ranks[1:]):
            self._zero_released = True
            self._ranks[0].allow_exit()

    def _end(self, failure: Exception | None) -> None:
        """Kill the remaining processes, wait until they have ended, finish."""
        if self.done:
            return
        self.send_signal(signal.SIGKILL)
        end_s = time.monotonic() + _GRACE_END_S
        while not self.done and not all(rank.has_ended for rank in self._ranks) and time.monotonic() < end_s:
            self._pump(0.05)
        self._finish(failure)

    def _finish(self, failure: Exception | None) -> None:
        if self.done:
            return
        del self._server._jobs[self._number]
        self._failure = failure
        if isinstance(failure, RankFailure):
            failure.output = [rank.output for rank in self._ranks]
        self._selector.close()
        for rank in self._ranks:
            rank.close()
        self._pages.close()


def create_shared_memory(n_bytes: int) -> int:
    """Return the descriptor of an anonymous file of `n_bytes` zeroed bytes, freed when the last process closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minidist-status")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, n_bytes)
    return fd
