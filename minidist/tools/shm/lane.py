"""Order and threads: operations of one lane run one after the other, lanes run side by side.

Whoever waits for an operation that is next in its lane runs it himself: a synchronous call with nothing before it never
leaves its thread. All others are run by worker threads, which are kept for the next operation and sleep in between.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from minidist.comm.hints import HINTS

_thread = threading.local()


def in_worker() -> bool:
    """Whether this is a worker thread, so that another does what the process is there for."""
    return getattr(_thread, "works", False)


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
            del task  # and with it a lane, which may be of a group that is gone
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


class Lane:
    """A first-in first-out sequence of operations of which one runs at a time."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._running = self._manned = False

    def submit(self, task: "Task", here: bool) -> None:
        """Queue it; or, with `here` and nothing before it, run it in this thread and return when it has ended."""
        with self._lock:
            if here and not self._queue and not self._running:
                self._running = True
            else:
                here = False
                task.hold()
                first = not self._queue and not self._running
                self._queue.append(task)
                if not (first and HINTS.wait_follows):
                    self._man()
        if here:
            self._finish(task)

    def man(self) -> None:
        """Let a worker do what is queued, if there is anything."""
        with self._lock:
            if self._queue:
                self._man()

    def take_over(self, task: "Task") -> None:
        """Run `task` in this thread if it is next and nobody runs it yet."""
        with self._lock:
            if self._running or not self._queue or self._queue[0] is not task:
                return
            self._queue.popleft()
            self._running = True
        self._finish(task)

    def fail(self, error: Exception) -> None:
        """End what has not begun with this error."""
        with self._lock:
            given_up, self._queue = self._queue, deque()
        for task in given_up:
            task.end(error)

    @property
    def quiet(self) -> bool:
        """Whether nothing runs or waits here."""
        with self._lock:
            return not self._running and not self._queue

    def _man(self) -> None:
        if not self._manned:
            self._manned = True
            self._workers.run(self._drain)

    def _finish(self, task: "Task") -> None:
        try:
            task.run()
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
                task = self._queue.popleft()
                self._running = True
            try:
                task.run()
            finally:
                with self._lock:
                    self._running = False
            del task


class Task:
    """What a lane runs, once. Who runs it has no reference to a tensor when it has ended: the memory of an operation is
    free as soon as those who wait for it let go."""

    def __init__(self, call: Callable[[], None]):
        self._call: Callable[[], None] | None = call
        self.error: Exception | None = None
        self.ended = False
        self._gate: threading.Lock | None = None  # held until it has ended, if others than its thread wait
        self._guard = threading.Lock()
        self._future: torch.futures.Future | None = None

    def hold(self) -> None:
        """Let the others wait until it ends."""
        self._gate = threading.Lock()
        self._gate.acquire()

    def passed(self, timeout_s: float | None) -> bool:
        """Whether it ended within that time; waits for ever with None."""
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._gate.release()
        return True

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
        """Tell whoever waits, which is the last thing: they may look at the memory."""
        with self._guard:
            if self.ended:
                return
            self._call = None
            self.error, self.ended = error, True
            future = self._future
        if self._gate is not None:
            self._gate.release()
        if future is not None:
            future.set_result(None)

    def future(self) -> torch.futures.Future:
        """Of its end, without a value: errors are seen from C++ only in what comes of it by `then`."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.ended:
                    self._future.set_result(None)
            return self._future
