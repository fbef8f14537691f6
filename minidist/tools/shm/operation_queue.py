"""Queues of operations and the threads that run them: one queue runs in order, different queues run concurrently.

A thread that waits for the next operation of a queue runs it itself, so a synchronous call on an empty queue never
leaves its thread. Worker threads run all other operations; they are reused and sleep in between.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from minidist.comm.hints import HINTS

_thread = threading.local()


def in_worker_thread() -> bool:
    """Return whether the calling thread is a worker thread, beside which the main thread computes."""
    return getattr(_thread, "works", False)


class WorkerThreads:
    """A pool of worker threads that grows to the number of queues with work at the same time."""

    def __init__(self):
        self._idle: list[queue.SimpleQueue] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, task: Callable[[], None]) -> None:
        """Run `task` in an idle worker thread, or in a new one if none is idle."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), name="shm", daemon=True).start()
        inbox.put(task)

    def close(self) -> None:
        """End the threads as soon as they have finished their current task."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _work(self, inbox: queue.SimpleQueue) -> None:
        _thread.works = True
        while (task := inbox.get()) is not None:
            task()
            del task  # drops the reference to a queue whose group may have been destroyed
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


class OperationQueue:
    """A first-in, first-out queue of operations; at most one of them runs at a time."""

    def __init__(self, workers: WorkerThreads):
        self._workers = workers
        self._lock = threading.Lock()
        self._queue: deque[Operation] = deque()
        self._running = self._worker_assigned = False

    def submit(self, task: "Operation", here: bool) -> None:
        """Queue the operation; with `here` and an empty queue, run it in the calling thread until it has ended."""
        with self._lock:
            if here and not self._queue and not self._running:
                self._running = True
            else:
                here = False
                task.allow_waiting()
                first = not self._queue and not self._running
                self._queue.append(task)
                if not (first and HINTS.wait_follows):
                    self._wake_worker()
        if here:
            self._finish(task)

    def run_in_worker(self) -> None:
        """Have a worker thread run the queued operations, if there are any."""
        with self._lock:
            if self._queue:
                self._wake_worker()

    def run_if_next(self, task: "Operation") -> None:
        """Run `task` in the calling thread if it is next in the queue and does not run yet."""
        with self._lock:
            if self._running or not self._queue or self._queue[0] is not task:
                return
            self._queue.popleft()
            self._running = True
        self._finish(task)

    def fail_pending(self, error: Exception) -> None:
        """End every operation that has not begun with this error."""
        with self._lock:
            pending, self._queue = self._queue, deque()
        for task in pending:
            task.end(error)

    @property
    def idle(self) -> bool:
        """Whether no operation runs or is queued."""
        with self._lock:
            return not self._running and not self._queue

    def _wake_worker(self) -> None:
        if not self._worker_assigned:
            self._worker_assigned = True
            self._workers.run(self._run_all)

    def _finish(self, task: "Operation") -> None:
        try:
            task.run()
        finally:
            with self._lock:
                self._running = False
                if self._queue:
                    self._wake_worker()

    def _run_all(self) -> None:
        while True:
            with self._lock:
                if self._running or not self._queue:
                    self._worker_assigned = False
                    return
                task = self._queue.popleft()
                self._running = True
            try:
                task.run()
            finally:
                with self._lock:
                    self._running = False
            del task


class Operation:
    """A call that an `OperationQueue` runs once, and its outcome.

    The call is dropped before the end is announced, so the running thread keeps no reference to the tensors.
    """

    def __init__(self, call: Callable[[], None]):
        self._call: Callable[[], None] | None = call
        self.error: Exception | None = None
        self.ended = False
        self._ended_lock: threading.Lock | None = None  # locked until the end, if other threads may wait
        self._guard = threading.Lock()
        self._future: torch.futures.Future | None = None

    def allow_waiting(self) -> None:
        """Let other threads wait for the end of this operation. Called before it is queued."""
        self._ended_lock = threading.Lock()
        self._ended_lock.acquire()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait for the end, without limit if `timeout_s` is None; return whether it came in time."""
        if not self._ended_lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._ended_lock.release()
        return True

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.end(error)
        except BaseException as stop:  # a signal in the calling thread: the operation is lost
            self.end(RuntimeError(f"the operation was interrupted by {type(stop).__name__}"))
            raise
        else:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        """Store the outcome, then wake the waiting threads, which may use the tensors from then on."""
        with self._guard:
            if self.ended:
                return
            self._call = None
            self.error, self.ended = error, True
            future = self._future
        if self._ended_lock is not None:
            self._ended_lock.release()
        if future is not None:
            future.set_result(None)

    def future(self) -> torch.futures.Future:
        """Return a future without a value that completes at the end; errors reach C++ only through its `then`."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.ended:
                    self._future.set_result(None)
            return self._future
