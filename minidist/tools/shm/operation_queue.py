"""Queues of operations and the threads that run them: one queue runs in order, different queues run concurrently.

An operation is a call that performs one collective, send or receive. A thread that waits for the next operation of a
queue runs it itself, so a synchronous call on an empty queue never leaves its thread. Worker threads run all other
operations; they are reused and sleep in between.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from minidist.comm.handles import HINTS

_thread = threading.local()


def is_in_worker_thread() -> bool:
    """Return whether the calling thread belongs to a `WorkerPool`."""
    return getattr(_thread, "works", False)


class WorkerPool:
    """Threads that run tasks. A new thread starts when a task is submitted and no thread is idle."""

    def __init__(self):
        self._idle: list[queue.SimpleQueue] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` in an idle thread of the pool, or in a new thread if none is idle; return at once."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._run_worker, args=(inbox,), name="shm", daemon=True).start()
        inbox.put(task)

    def request_stop(self) -> None:
        """Tell every thread of the pool to end after its current task; return at once."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _run_worker(self, inbox: queue.SimpleQueue) -> None:
        """Run the tasks that arrive in `inbox`, in a thread of its own, until the pool stops."""
        _thread.works = True
        while (task := inbox.get()) is not None:
            task()
            del task  # drops the reference to a queue whose group may have been destroyed
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


class OperationQueue:
    """A first-in, first-out queue of `Operation`s, which run one at a time.

    workers: the threads that run the operations, unless the thread that waits for an operation runs it (`run_if_next`).
    """

    def __init__(self, workers: WorkerPool):
        self._workers = workers
        self._lock = threading.Lock()
        self._queue: deque[Operation] = deque()
        self._running = self._worker_assigned = False

    def submit(self, operation: "Operation", run_in_caller: bool) -> None:
        """Run `operation` to its end in the calling thread if `run_in_caller` and the queue is idle; else append it.

        An appended operation runs in its turn, in a worker thread or in a thread that waits for it, and this method
        returns at once.
        """
        with self._lock:
            if run_in_caller and not self._queue and not self._running:
                self._running = True
            else:
                run_in_caller = False
                operation._enable_waiting()
                first = not self._queue and not self._running
                self._queue.append(operation)
                if not (first and HINTS.expect_immediate_wait):
                    self._wake_worker()
        if run_in_caller:
            self._run_and_continue(operation)

    def start_worker(self) -> None:
        """Let a thread of the worker pool run the queued operations, if there are any; return at once."""
        with self._lock:
            if self._queue:
                self._wake_worker()

    def run_if_next(self, operation: "Operation") -> None:
        """If `operation` is the first in the queue and none is running, run it to its end in the calling thread."""
        with self._lock:
            if self._running or not self._queue or self._queue[0] is not operation:
                return
            self._queue.popleft()
            self._running = True
        self._run_and_continue(operation)

    def fail_pending_operations(self, error: Exception) -> None:
        """End every queued operation that has not started; its waiters get `error`."""
        with self._lock:
            pending, self._queue = self._queue, deque()
        for operation in pending:
            operation.complete(error)

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty and no operation of it is running."""
        with self._lock:
            return not self._running and not self._queue

    def _wake_worker(self) -> None:
        """Submit the queue to the worker pool, unless a worker has it already. The caller holds the lock."""
        if not self._worker_assigned:
            self._worker_assigned = True
            self._workers.submit(self._run_queued_operations)

    def _run_and_continue(self, operation: "Operation") -> None:
        """Run `operation` in the calling thread; then let a worker thread run the operations behind it."""
        try:
            operation.run()
        finally:
            with self._lock:
                self._running = False
                if self._queue:
                    self._wake_worker()

    def _run_queued_operations(self) -> None:
        """Run the queued operations in order, in a worker thread, until the queue is empty."""
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
    """One function call that an `OperationQueue` runs, and its outcome.

    error: the exception that the call raised; None if it succeeded or has not ended. ended: whether the call has ended.
    The call is deleted before `ended` becomes True, so that the thread that runs it keeps no reference to its tensors.
    """

    def __init__(self, call: Callable[[], None]):
        self._call: Callable[[], None] | None = call
        self.error: Exception | None = None
        self.ended = False
        self._ended_lock: threading.Lock | None = None  # locked until the end, if other threads may wait
        self._guard = threading.Lock()
        self._future: torch.futures.Future | None = None

    def _enable_waiting(self) -> None:
        """Prepare for `wait_until_ended` by other threads. Must be called before the operation is queued."""
        self._ended_lock = threading.Lock()
        self._ended_lock.acquire()

    def wait_until_ended(self, timeout_s: float | None) -> bool:
        """Block until the operation has ended; return False if that takes more than `timeout_s` (None: no limit)."""
        if not self._ended_lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._ended_lock.release()
        return True

    def run(self) -> None:
        """Run the operation in the calling thread and store its outcome, for `OperationQueue`.

        An error is only stored; a KeyboardInterrupt is stored and raised.
        """
        try:
            self._call()
        except Exception as error:
            self.complete(error)
        except BaseException as stop:  # a signal in the calling thread: the operation is lost
            self.complete(RuntimeError(f"the operation was interrupted by {type(stop).__name__}"))
            raise
        else:
            self.complete(None)

    def complete(self, error: Exception | None) -> None:
        """End the operation with this outcome (None: success) and wake waiting threads. A second call does nothing."""
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

    def get_future(self) -> torch.futures.Future:
        """Return a future that completes with None when the operation ends, even if it failed: check `error`."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.ended:
                    self._future.set_result(None)
            return self._future
