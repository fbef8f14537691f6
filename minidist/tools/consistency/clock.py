"""Simulated time: asynchronous workers and their server in one process, in the order that given durations imply.

A discrete-event simulation: the parameters, gradients and updates are real, only the time is not. The durations are
functions of their addresses, so a run is the same twice and on any machine.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.hashing import hash64
from minidist.simple.consistency import Pull, Push, Server, Worker, asynchronous_worker
from minidist.tools.simulate.failures import Phase

COMPUTING, MESSAGE, WAITING, LINK_BUSY = "computing", "message", "waiting for others", "link is busy"


@dataclass(frozen=True)
class Durations:
    """How long the workers of an asynchronous run compute and their messages take, in seconds of simulated time.

    compute_s: for each worker, the time to compute a gradient. transfer_s: for each worker, the time of a message with
    gradient or parameters between it and the server; requests and acknowledgements take no time. spread: each duration
    is multiplied by a random number from 1 - spread to 1 + spread. seed: of these numbers. shared_link: whether the
    server sends and receives one message at a time. leave_s: by worker, the time at which it leaves the run; a gradient
    it has not pushed by then is lost.
    """

    compute_s: Sequence[float]
    transfer_s: Sequence[float]
    spread: float = 0.0
    seed: int = 0
    shared_link: bool = False
    leave_s: Mapping[int, float] = field(default_factory=dict)

    def duration_s(self, kind: int, worker: int, number: int) -> float:
        """Return the duration of one computation (kind 0) or one message (kind 1) of a worker, in simulated seconds.

        number: 0 for the worker's first computation or message, 1 for its second, ... Equal arguments give equal
        durations.
        """
        mean_s = (self.compute_s, self.transfer_s)[kind][worker]
        if not self.spread:
            return mean_s
        uniform = int(hash64(self.seed, kind, worker, number)) / 2**64
        return mean_s * (1 + self.spread * (2 * uniform - 1))


@dataclass
class Timeline:
    """When the updates of an asynchronous run occurred, in seconds of simulated time.

    updates: (time, worker) of each update, in order. waited_s: the total time that each worker waited because of the
    staleness bound. phases: what each worker did from when to when. end_s: the time of the last event.
    """

    updates: list[tuple[float, int]]
    waited_s: list[float]
    phases: list[list[Phase]]
    end_s: float = 0.0


class _Simulation:
    """A discrete-event simulation of asynchronous workers and their server."""

    def __init__(self, server: Server, workers: Sequence[Worker], durations: Durations):
        self.server, self.workers, self.durations = server, dict(enumerate(workers)), durations
        self.timeline = Timeline([], [0.0] * len(workers), [[] for _ in workers])
        self._events: list[tuple] = []  # (time, whether it is a push, order, worker, request, whether it has arrived)
        self._order = 0
        self._numbers = [[0] * len(workers), [0] * len(workers)]  # durations drawn so far, by kind and worker
        self._arrived_s: dict[int, float] = {}
        self._link_free_s = 0.0

    def run(self) -> Timeline:
        """Process all events in the order of simulated time; return when each occurred."""
        for worker, leave_s in self.durations.leave_s.items():
            self._schedule_event(leave_s, worker, None)
        for worker in list(self.workers):
            self._resume(worker, 0.0, None)
        while self._events:
            now_s, _, _, worker, request, has_arrived = heapq.heappop(self._events)
            if worker not in self.workers:
                continue  # it has left
            self.timeline.end_s = now_s
            if has_arrived:
                self._arrived_s[worker] = now_s
                self._handle(worker, request, now_s)
            else:
                self._schedule_event(self._send_message(worker, now_s), worker, request)
        return self.timeline

    def _handle(self, worker: int, request: Pull | Push | None, now_s: float) -> None:
        """Let the server handle a request that has arrived, and resume the workers that it answers.

        request: None if the worker leaves.
        """
        if request is None:
            self.workers.pop(worker).close()
        for other, answer in self.server.handle(worker, request):
            self.timeline.waited_s[other] += now_s - self._arrived_s[other]
            self._record_phase(other, WAITING, self._arrived_s[other], now_s)
            if answer is None:
                self.timeline.updates.append((now_s, other))
                self._resume(other, now_s, None)
            else:
                self._resume(other, self._send_message(other, now_s), answer)

    def _resume(self, worker: int, now_s: float, answer: Tensor | None) -> None:
        """Run a worker to its next request, and schedule the request's arrival at the server.

        answer: of the server to its last request.
        """
        try:
            request = self.workers[worker].send(answer)
        except StopIteration:
            self._schedule_event(now_s, worker, None)
            return
        if isinstance(request, Pull):
            self._schedule_event(now_s, worker, request)
        else:
            computed_s = now_s + self._next_duration_s(0, worker)
            self._record_phase(worker, COMPUTING, now_s, computed_s)
            self._schedule_event(computed_s, worker, request, has_arrived=False)

    def _send_message(self, worker: int, now_s: float) -> float:
        """Occupy the link with a message that is sent now; return the time at which it arrives."""
        duration_s = self._next_duration_s(1, worker)
        if not duration_s:  # the worker is in the server's process, and uses no link
            return now_s
        start_s = max(now_s, self._link_free_s) if self.durations.shared_link else now_s
        self._link_free_s = start_s + duration_s
        self._record_phase(worker, LINK_BUSY, now_s, start_s)
        self._record_phase(worker, MESSAGE, start_s, self._link_free_s)
        return self._link_free_s

    def _record_phase(self, worker: int, kind: str, start_s: float, stop_s: float) -> None:
        """Add a phase of this kind to the timeline of a worker, unless it is empty."""
        if stop_s > start_s:
            self.timeline.phases[worker].append(Phase(kind, start_s, stop_s))

    def _next_duration_s(self, kind: int, worker: int) -> float:
        """Return the duration of a worker's next computation (kind 0) or message (kind 1)."""
        number = self._numbers[kind][worker]
        self._numbers[kind][worker] += 1
        return self.durations.duration_s(kind, worker, number)

    def _schedule_event(
        self, time_s: float, worker: int, request: Pull | Push | None, has_arrived: bool = True
    ) -> None:
        """Schedule a request. has_arrived: whether it reaches the server at `time_s`; else it is sent then."""
        # At equal times a worker pulls before another pushes: its pull follows its own push without delay.
        key = time_s, isinstance(request, Push), self._order
        heapq.heappush(self._events, (*key, worker, request, has_arrived))
        self._order += 1


def run_on_virtual_clock(server: Server, workers: Sequence[Worker], durations: Durations) -> Timeline:
    """Run asynchronous workers and their server in this process until all workers have ended; return when they updated.

    Computations are real; the order of events follows from `durations`, in simulated time. server: made for these
    workers.
    """
    return _Simulation(server, workers, durations).run()


def run_timed_workers(durations: Durations, num_steps: int, bound: int | None = None) -> tuple[Server, Timeline]:
    """Run asynchronous workers whose gradients do not matter, for the times only; return their server and timeline.

    durations: of each worker. num_steps: of each worker. bound: the server's staleness bound, None for no bound.
    """
    count = len(durations.compute_s)
    server = Server(torch.zeros(1), lambda parameters, gradient: None, count, bound)
    workers = [asynchronous_worker(lambda parameters, step: parameters, num_steps) for _ in range(count)]
    return server, run_on_virtual_clock(server, workers, durations)


def pulled_versions(server: Server, timeline: Timeline) -> list[list[int]]:
    """Return for each worker the number of updates before the pull of each of its gradients."""
    versions: list[list[int]] = [[] for _ in timeline.phases]
    for number, ((_, worker), late) in enumerate(zip(timeline.updates, server.staleness, strict=True)):
        versions[worker].append(number - late)
    return versions
