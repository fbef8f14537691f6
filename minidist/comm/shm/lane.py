"""Order and threads: operations of one lane run one after the other, lanes run side by side.

Whoever waits for an operation that is next in its lane runs it himself: a synchronous call with nothing before it never
leaves its thread. All others are run by worker threads, which are kept for the next operation and sleep in between.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_thread = threading.local()


def in_worker() -> bool:
    """Whether this is a worker thread, so that another does what the process is there for."""
    return getattr(_thread, "works", False)


@contextlib.contextmanager
def waited_for_at_once():
    """Within this context this thread launches what it waits for next: no worker need be woken for it."""
    _thread.waits = True
    try:
        yield
    finally:
        _thread.waits = False


class Workers:
    """Threads that are there when needed. As many run as lanes have something to do at one time."""

    def __init__(self):
        self._idle: list[queue.SimpleQueue] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, task: Callable[[], None]) -> None:
        """Run `task` in a thread that does nothing else meanwhile."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), name="shm", daemon=True).start()
        inbox.put(task)

    def close(self) -> None:
        """Let the threads end when they have done what they do."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _work(self, inbox: queue.SimpleQueue) -> None:
        _thread.works = True
        while (task := inbox.get()) is not None:
            task()
            del task  # it holds tensors
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


class Lane:
    """A first-in first-out sequence of operations of which one runs at a time."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._lock = threading.Lock()
        self._queue: deque[Work] = deque()
        self._running = self._manned = False

    def submit(self, work: "Work", here: bool) -> None:
        """Queue it; or, with `here` and nothing before it, run it in this thread and return when it has ended."""
        with self._lock:
            if here and not self._queue and not self._running:
                self._running = True
            else:
                here = False
                work.hold()
                first = not self._queue and not self._running
                self._queue.append(work)
                if not (first and getattr(_thread, "waits", False)):
                    self._man()
        if here:
            self._finish(work)

    def man(self) -> None:
        """Let a worker do what is queued, if there is anything."""
        with self._lock:
            if self._queue:
                self._man()

    def take_over(self, work: "Work") -> None:
        """Run `work` in this thread if it is next and nobody runs it yet."""
        with self._lock:
            if self._running or not self._queue or self._queue[0] is not work:
                return
            self._queue.popleft()
            self._running = True
        self._finish(work)

    def fail(self, error: Exception) -> None:
        """End what has not begun with this error."""
        with self._lock:
            given_up, self._queue = self._queue, deque()
        for work in given_up:
            work.end(error)

    @property
    def quiet(self) -> bool:
        """Whether nothing runs or waits here."""
        with self._lock:
            return not self._running and not self._queue

    def _man(self) -> None:
        if not self._manned:
            self._manned = True
            self._workers.run(self._drain)

    def _finish(self, work: "Work") -> None:
        try:
            work.run()
        finally:
            with self._lock:
                self._running = False
                if self._queue:
                    self._man()

    def _drain(self) -> None:
        while True:
            with self._lock:
                if self._running or not self._queue:
                    self._manned = False
                    return
                work = self._queue.popleft()
                self._running = True
            try:
                work.run()
            finally:
                with self._lock:
                    self._running = False
            del work


class Work(dist.Work):
    """An operation on its way: torch's handle for it.

    call: what to do; tensors: the results; source: the rank that a receive is from.
    """

    def __init__(self, lane: Lane, call: Callable[[], None], tensors: Sequence[Tensor] = (), source: int = -1):
        super().__init__()
        self._lane, self._call, self._tensors, self.source = lane, call, list(tensors), source
        self._error: Exception | None = None
        self._ended = False
        self._gate: threading.Lock | None = None  # held until the operation has ended, if others than its thread wait
        self._guard = threading.Lock()
        self._future: torch.futures.Future | None = None

    def hold(self) -> None:
        """Let the others wait until it ends."""
        self._gate = threading.Lock()
        self._gate.acquire()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.end(error)
        except BaseException as stop:  # a signal in the thread that waits: the operation is lost, and it says so
            self.end(RuntimeError(f"the operation was interrupted by {type(stop).__name__}"))
            raise
        else:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        with self._guard:
            if self._ended:
                return
            self._error, self._ended, self._call = error, True, None
            future = self._future
        if self._gate is not None:
            self._gate.release()
        if future is not None:
            future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation has ended; raises what went wrong, or after `timeout` (0: none) that."""
        if not self._ended:
            if not timeout:
                self._lane.take_over(self)
            else:
                self._lane.man()
            if not self._gate.acquire(timeout=timeout.total_seconds() if timeout else -1):
                raise dist.DistBackendError(f"the operation has not ended after {timeout.total_seconds():g} s")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self):
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the list of results. Errors go through `then`, as only its errors are seen from C++."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._ended:
                    self._future.set_result(None)
            future = self._future
        return future.then(self._outcome)

    def get_future_result(self) -> torch.futures.Future:
        return self.get_future()

    def _outcome(self, _) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
