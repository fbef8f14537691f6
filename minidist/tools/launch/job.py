"""The client's side of one job: start its ranks, watch their status, collect results, detect failures."""

import contextlib
import mmap
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.tools.deadlock.detector import DeadlockDetector, find_awaited_ranks
from minidist.tools.deadlock.hang import (
    ASK_S,
    NOTICE_S,
    STOPPED,
    HangTracker,
    describe_hang,
    describe_process,
    describe_wait,
    waiting_ranks,
)
from minidist.tools.deadlock.status_page import PAGE_BYTES, Snapshot, StatusPage
from minidist.tools.launch.failure import RankFailure
from minidist.tools.launch.failure_report import report_deaths, report_errors, report_missed_deadline
from minidist.tools.launch.rank_handle import RankHandle, find_innermost_line

if TYPE_CHECKING:
    from minidist.tools.launch.client import RankServer

_GRACE_DIED_S = 0.15  # after a death, to report others that die of the same cause with it
_GRACE_RAISED_S = 1.0  # after an exception or sys.exit, for others that are about to do the same
_GRACE_END_S = 10.0  # after the last result, for processes to exit


@dataclass(frozen=True)
class Result:
    """The return values and the output of all ranks of a job that has ended.

    values: the return value of each rank; None for a rank that died and was not replaced. output: the stdout and stderr
    of each rank, as one text; "" if not captured.
    """

    values: list[Any]
    output: list[str]


@dataclass(frozen=True)
class Replacement:
    """How a job replaces ranks that die, instead of failing.

    max_restarts: how many processes may be started as replacements, in all; later deaths leave a rank missing.
    min_ranks: the job fails once fewer ranks than this are left.
    """

    max_restarts: int
    min_ranks: int


class Job:
    """A function that runs on the ranks of a `RankServer`, seen from the process that started it.

    Made by `RankServer.start`, which explains the other arguments. number: index of the job on this server. size:
    number of ranks. bootstrap: the function and settings that are sent to every rank.
    There is no background thread: output, results and failures are processed only within `poll` and `wait`.
    """

    def __init__(
        self,
        server: "RankServer",
        number: int,
        size: int,
        bootstrap: dict,
        capture: bool,
        deadline_s: float | None,
        hang_limit_s: float,
        replacement: Replacement | None = None,
    ):
        self.size, self._server, self._number, self._deadline_s = size, server, number, deadline_s
        self._hangs, self._hang_limit_s, self._noted_hangs = HangTracker(), hang_limit_s, {}
        self._waiting_since_s: dict[tuple[int, int], float] = {}  # by rank and version of its status
        self._is_stopping = False
        self._start_s = time.monotonic()
        self._detector = DeadlockDetector()
        self._failure: Exception | None = None
        self._first_seen_s: dict[str, float] = {}  # when a rank was first seen to have died, or raised
        self._release_time: float | None = None
        self._is_rank_0_released = False
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankHandle] = []
        self._capture, self._replacement, self._num_restarts, self._is_ending = capture, replacement, 0, False
        self._members = list(range(size))  # of each rank, the number of its process among all of the job
        self._store: Any = None  # served here if ranks are replaced, so that it outlives every rank
        server._jobs[number] = self
        self._selector.register(server._connection.socket, selectors.EVENT_READ, self._on_server_readable)
        self._status_fd = _create_shared_memory(PAGE_BYTES * size)
        self._pages = mmap.mmap(self._status_fd, PAGE_BYTES * size)
        self._start_ranks(bootstrap)

    # -- public interface ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process id of each rank, in rank order; 0 for a rank that has not started yet."""
        return [rank.pid for rank in self._ranks]

    @property
    def has_ended(self) -> bool:
        """Whether the job and all its rank processes have ended, with or without success."""
        return self._number not in self._server._jobs

    def wait(self) -> Result:
        """Block until the job has ended; return the values and the output of the ranks. Ctrl-C kills the ranks.

        Raises RankFailure if ranks failed, or the UserError or RunError that ranks raised if that is the only cause.
        """
        try:
            while not self.poll(1.0):
                pass
        except BaseException:
            self.kill()
            raise
        if self._failure is not None:
            raise self._failure
        load = self._server.load_message
        values = [None if rank.is_left_out else load(rank.payload) for rank in self._ranks]
        return Result(values, [rank.output for rank in self._ranks])

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Process output, results and failures for at most `timeout_s` seconds; return whether the job has ended."""
        if not self.has_ended:
            if self._release_time is None:  # deadlock detection goes on until all ranks have returned
                timeout_s = min(timeout_s, self._detector.seconds_until_next_reading(time.monotonic()))
            self._process_events(timeout_s)
        if not self.has_ended:
            self._check_progress(time.monotonic())
        return self.has_ended

    def send_signal(self, signal_number: int, rank: int | None = None) -> None:
        """Send a POSIX signal to one rank, or to all ranks if `rank` is None. May be called in a signal handler."""
        self._server._send({"op": "signal", "job": self._number, "rank": rank, "signal": int(signal_number)})

    def stop(self, signal_number: int) -> None:
        """Send all ranks a signal that asks them to end; return at once. May be called in a signal handler.

        From now on the job fails as soon as a rank is stopped (SIGSTOP), since such a rank cannot end by itself. A rank
        that runs while others wait for it may be saving, and has until the hang limit as before.
        """
        self._is_stopping = True
        self.send_signal(signal_number)

    def kill(self) -> None:
        """Kill all ranks of the job and wait until they have ended. A later `wait` raises RankFailure."""
        self._kill_and_finish(RankFailure("killed", range(self.size), "the job was killed"))

    def status_snapshots(self) -> list[Snapshot | None]:
        """Return the current status of each rank, in rank order; None for a rank that is just updating its status, or
        whose code has written something else there.

        The status is the operation that the rank runs or waits for (see `StatusPage`). Call this only while the job
        runs.
        """
        pages = memoryview(self._pages)
        return [_read_status(pages[PAGE_BYTES * rank : PAGE_BYTES * (rank + 1)]) for rank in range(self.size)]

    def output(self, rank: int) -> str:
        """Return the stdout and stderr of one rank so far, as one text; "" if not captured."""
        return self._ranks[rank].output

    def dump_stacks(self, timeout_s: float = 2.0, only_rank: int | None = None) -> dict[int, str]:
        """Request and return the current Python stack of each living rank: text by rank, innermost call first.

        timeout_s: seconds to wait for the stacks, of which a busy machine needs more than one; it waits no longer than
        until all have arrived. A rank that has sent none by then has "". only_rank: return the stack of this rank
        alone; None: all ranks.
        """
        alive = {
            number: rank
            for number, rank in enumerate(self._ranks)
            if not rank.has_ended and only_rank in (None, number)
        }
        for rank in alive.values():
            rank.clear_stack()
        self.send_signal(signal.SIGUSR1, only_rank)
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not all(rank.is_stack_complete for rank in alive.values()):
            self._process_events(0.02)
        return {number: rank.stack for number, rank in alive.items()}

    # -- implementation -----------------------------------------------------------------------------------------------

    def _start_ranks(self, bootstrap: dict) -> None:
        """Start a process for every rank, with the store that rank 0 or this process serves."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()  # earlier output of this process must precede that of the ranks
        store_socket = self._server.create_listening_socket(backlog=max(128, self.size))
        port = store_socket.getsockname()[1]
        self._bootstrap = {**bootstrap, "size": self.size, "port": port}
        if self._replacement is not None:
            self._store = _serve_store(store_socket.detach(), port)
        for number in range(self.size):
            serves = number == 0 and self._store is None
            self._ranks.append(self._start_rank(number, (store_socket.fileno(),) if serves else ()))
        store_socket.close()
        for number in range(self.size):
            self._send_bootstrap(number)

    def _start_rank(self, number: int, store_fd: tuple[int, ...] = ()) -> RankHandle:
        """Ask the server to start one process; return its handle. store_fd: the listening socket, on rank 0."""
        control, their_control = socket.socketpair()
        stack_fd, their_stack = os.pipe()
        output_fd, their_output = os.pipe() if self._capture else (None, None)
        rank = RankHandle(control, output_fd, stack_fd, self._server.load_message)
        self._register_reader(control, rank.read_messages)
        self._register_reader(stack_fd, rank.read_stack_bytes)
        if self._capture:
            self._register_reader(output_fd, rank.read_output)
        streams = (their_output, their_output) if self._capture else (1, 2)
        fds = (*streams, their_control.fileno(), their_stack, self._status_fd, *store_fd)
        self._server._send({"op": "start", "job": self._number, "rank": number}, fds)
        their_control.close()
        os.close(their_stack)
        if self._capture:
            os.close(their_output)
        return rank

    def _send_bootstrap(self, number: int) -> None:
        """Send process `number` the function and its settings."""
        self._ranks[number].send_bootstrap({**self._bootstrap, "rank": number, "member": self._members[number]})

    def _replace_rank(self, number: int) -> None:
        """Tell the other ranks that this one has died, and start another process in its place if that is allowed."""
        from minidist.tools.recovery.membership import Death, record_death

        rank, replacement = self._ranks[number], self._replacement
        cause = rank.death_cause.removeprefix("died: ")
        record_death(self._store, Death(self._members[number], rank.pid, cause, time.time()))
        if self._num_restarts == replacement.max_restarts:
            rank.is_left_out = sum(not other.has_died for other in self._ranks) >= replacement.min_ranks
            return
        for file in (rank.control, *rank.fds):
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
        rank.close()
        self._pages[PAGE_BYTES * number : PAGE_BYTES * (number + 1)] = bytes(PAGE_BYTES)
        self._members[number] = self.size + self._num_restarts
        self._num_restarts += 1
        self._ranks[number] = self._start_rank(number)
        self._ranks[number].take_over_output_of(rank)
        self._send_bootstrap(number)

    def _register_reader(self, file, read) -> None:
        """Call `read` whenever `file` is readable, until `read` returns False."""

        def read_or_unregister():
            if not read():
                self._selector.unregister(file)

        self._selector.register(file, selectors.EVENT_READ, read_or_unregister)

    def _process_events(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for input from the server or the ranks, and process it."""
        for key, _ in self._selector.select(timeout_s):
            if self.has_ended:  # a message of the server has ended it
                return
            if any(known is key for known in self._selector.get_map().values()):  # else its rank was just replaced
                key.data()

    def _on_server_readable(self) -> None:
        """Process messages of the server; end the job if the server has died."""
        if not self._server._receive():
            report = f"the rank server (process {self._server.pid}) died, and all ranks with it"
            self._finish(RankFailure("server", range(self.size), report))

    def _on_rank_event(self, message: dict) -> None:
        """Handle the server's report that a rank has started or ended."""
        rank = self._ranks[message["rank"]]
        if message["event"] == "started":
            rank.pid = message["pid"]
        else:
            rank.drain_and_mark_ended(message["code"])
            if self._replacement is not None and rank.state == "running" and not self._is_ending:
                self._replace_rank(message["rank"])

    def _check_progress(self, now_s: float) -> None:
        """Look for deaths, errors, deadlocks, hangs, the deadline and the end of all ranks; end the job accordingly."""
        if self._release_time is not None:
            return self._finish_returned_ranks(now_s)
        due = self._detector.seconds_until_next_reading(now_s) == 0.0
        snapshots = self.status_snapshots() if due else []
        diagnosis = self._detector.update(self._select_connected_ranks(snapshots), now_s) if due else None
        all_ended = all(rank.state != "running" or rank.has_ended for rank in self._ranks)
        if any(rank.has_died and not rank.is_left_out for rank in self._ranks):
            all_exited = all(rank.state == "exit" for rank in self._ranks if rank.has_died)
            grace_s = _GRACE_RAISED_S if all_exited else _GRACE_DIED_S
            if all_ended or now_s - self._note_first_time("died", now_s) >= grace_s:
                self._kill_and_finish(report_deaths(self._ranks, self.status_snapshots()))
        elif any(rank.error for rank in self._ranks):
            if all_ended or diagnosis or now_s - self._note_first_time("raised", now_s) >= _GRACE_RAISED_S:
                self._kill_and_finish(report_errors(self._ranks, self.status_snapshots()))
        elif all_ended:
            self._allow_exits(now_s)
        elif diagnosis:
            self._kill_and_finish(RankFailure(diagnosis.kind, diagnosis.ranks, diagnosis.text))
        elif self._deadline_s is not None and now_s - self._start_s > self._deadline_s:
            self._kill_and_finish(report_missed_deadline(self._deadline_s, self.status_snapshots(), self.dump_stacks()))
        elif due and not any(rank.has_ended for rank in self._ranks):
            self._check_hangs(snapshots, now_s)

    def _check_hangs(self, snapshots: list[Snapshot | None], now_s: float) -> None:
        """Name the ranks that are stopped or run while others wait for them; kill them after the limit.

        If the job is stopping, end it because of a stopped rank.
        """
        slots = self._list_processes_by_rank()
        seen = {rank: snapshots[slot] for rank, slot in enumerate(slots)} if snapshots else {}
        found = find_awaited_ranks({rank: snapshot for rank, snapshot in seen.items() if snapshot is not None})
        awaited = {rank: waiting for rank, waiting in found.items() if rank in seen}  # not of a former generation
        waited_s = self._hangs.seconds_awaited(awaited, now_s)
        waits = [(n, s.version) for n, s in enumerate(snapshots) if s is not None and s.state == "waiting"]
        self._waiting_since_s = {wait: self._waiting_since_s.get(wait, now_s) for wait in waits}
        longest_s = max((now_s - since_s for since_s in self._waiting_since_s.values()), default=0.0)
        waiting_by_rank = {rank: waiting_ranks(waits) for rank, waits in awaited.items()}
        # A rank that was stopped within an operation has launched it, so by their status nobody waits for it.
        for rank, handle in enumerate(self._ranks) if longest_s >= ASK_S else ():
            if rank not in waited_s and describe_process(handle.pid) == STOPPED:
                waited_s[rank], waiting_by_rank[rank] = longest_s, [n for n, _ in waits if n != rank]
        self._noted_hangs = {rank: note for rank, note in self._noted_hangs.items() if rank in waited_s}
        for rank, seconds in sorted(waited_s.items()):
            slot = slots[rank]
            process = describe_process(self._ranks[slot].pid) if seconds >= ASK_S else None
            waiting = waiting_by_rank[rank]
            if rank not in self._noted_hangs and (process == STOPPED or seconds >= NOTICE_S):
                line = None if process == STOPPED else find_innermost_line(self.dump_stacks(only_rank=slot)[slot])
                self._noted_hangs[rank] = describe_hang(rank, process, line, seconds, waiting)
                print(self._noted_hangs[rank], file=sys.stderr, flush=True)
            if seconds >= self._hang_limit_s and not self._ranks[slot].hang_note:
                self._ranks[slot].hang_note = f" after {describe_wait(seconds, waiting)}"
                self.send_signal(signal.SIGKILL, slot)
        if self._is_stopping:
            stopped = [n for n, handle in enumerate(self._ranks) if describe_process(handle.pid) == STOPPED]
            if stopped:
                notes = [self._noted_hangs.get(rank, f"rank {rank} is {STOPPED}") for rank in stopped]
                self._kill_and_finish(RankFailure("hang", stopped, "\n".join(notes)))

    def _select_connected_ranks(self, snapshots: list[Snapshot | None]) -> dict[int, Snapshot | None]:
        """Return the status of the ranks among which deadlock detection may look, by rank.

        If dead ranks are replaced: all ranks of a generation while it works. Before and after, the pages of some
        ranks are still about the operations of the last generation.
        """
        if self._store is None:
            return dict(enumerate(snapshots))
        from minidist.tools.recovery.membership import is_connected, read_latest_generation

        generation = read_latest_generation(self._store)
        if generation is None or not set(generation.ranks) <= set(self._members):
            return {}
        slots = [self._members.index(member) for member in generation.ranks]
        if any(self._ranks[slot].has_ended for slot in slots) or not is_connected(self._store, generation):
            return {}
        return {rank: snapshots[slot] for rank, slot in enumerate(slots)}

    def _list_processes_by_rank(self) -> list[int]:
        """Return the index in `_ranks` of each rank: the ranks change when dead ones are replaced."""
        if self._store is None:
            return list(range(self.size))
        from minidist.tools.recovery.membership import read_latest_generation

        generation = read_latest_generation(self._store)
        members = () if generation is None else generation.members
        return [self._members.index(member) for member in members if member in self._members]

    def _note_first_time(self, event: str, now_s: float) -> float:
        """Return the time at which `event` was noted first: `now_s` in the first call."""
        return self._first_seen_s.setdefault(event, now_s)

    def _allow_exits(self, now_s: float) -> None:
        """After all ranks have returned, let them exit; rank 0, which serves the store, last."""
        self._release_time = now_s
        for rank in self._ranks[1:]:
            rank.allow_exit()
        self._finish_returned_ranks(now_s)

    def _finish_returned_ranks(self, now_s: float) -> None:
        """Finish the job once all ranks have exited, and kill ranks that do not exit in time."""
        if all(rank.has_ended for rank in self._ranks):
            self._finish(None)
        elif now_s - self._release_time > _GRACE_END_S:
            self._kill_and_finish(None)  # the results have arrived; kill processes that do not exit
        elif not self._is_rank_0_released and all(rank.has_ended for rank in self._ranks[1:]):
            self._is_rank_0_released = True
            self._ranks[0].allow_exit()

    def _kill_and_finish(self, failure: Exception | None) -> None:
        """Kill the remaining processes, wait until they have ended, finish."""
        if self.has_ended:
            return
        self._is_ending = True
        self.send_signal(signal.SIGKILL)
        end_s = time.monotonic() + _GRACE_END_S
        while not self.has_ended and not all(rank.has_ended for rank in self._ranks) and time.monotonic() < end_s:
            self._process_events(0.05)
        self._finish(failure)

    def _finish(self, failure: Exception | None) -> None:
        """Mark the job as ended with this failure (None: success), and close its pipes and shared memory."""
        if self.has_ended:
            return
        del self._server._jobs[self._number]
        self._failure = failure
        if isinstance(failure, RankFailure):
            failure.output = [rank.output for rank in self._ranks]
        self._selector.close()
        for rank in self._ranks:
            rank.close()
        self._pages.close()
        os.close(self._status_fd)
        self._store = None


def _read_status(page: memoryview) -> Snapshot | None:
    """Return the status on a page; None if it cannot be read, or the rank's code has written something else."""
    try:
        return StatusPage.read_snapshot(page)
    except (ValueError, IndexError):  # the code of the rank has written to every file descriptor that it found
        return None


def _serve_store(listen_fd: int, port: int) -> Any:
    """Serve and return a `TCPStore` in this process. listen_fd: a socket that already listens on `port`."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)


def _create_shared_memory(num_bytes: int) -> int:
    """Return the file descriptor of an anonymous file of `num_bytes` zeros, freed when the last process closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minidist-status")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
