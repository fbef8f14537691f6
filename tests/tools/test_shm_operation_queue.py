"""An operation queue of `shm` without ranks: the thread that runs an operation, and its references."""

import functools
import threading
import weakref

import torch

from minidist.tools.shm.operation_queue import OperationQueue, WorkerPool
from minidist.tools.shm.work import Work


class NoWorkers:
    """A worker pool without threads."""

    def submit(self, task) -> None:
        pass


def test_a_wait_for_the_next_operation_runs_it_in_the_waiting_thread():
    queue, done = OperationQueue(NoWorkers()), []
    at_once, first, second = (Work(queue, lambda i=i: done.append(i)) for i in range(3))
    at_once.start(run_in_caller=True)
    assert done == [0] and at_once.is_success()
    first.start(run_in_caller=False)
    second.start(run_in_caller=True)  # first is before it
    assert done == [0]
    first.wait()
    assert done == [0, 1]
    second.wait()
    assert done == [0, 1, 2] and queue.is_idle


class CallsWhenFreed:
    """Records what `ask` returns when its last reference is dropped."""

    def __init__(self, ask, answers: list):
        self.ask, self.answers = ask, answers

    def __del__(self):
        self.answers.append(self.ask())


def test_the_worker_releases_tensors_before_the_operation_is_done():
    """Otherwise tensors would be freed later, and in another thread than the waiting one."""
    queue, answers = OperationQueue(NoWorkers()), []
    work = Work(queue, functools.partial(bool, CallsWhenFreed(lambda: work.is_completed(), answers)))
    work.start(run_in_caller=False)
    work.wait()
    assert answers == [False]


def test_the_worker_does_not_keep_an_operations_result():
    workers, go, gone = WorkerPool(), threading.Event(), threading.Event()
    queue, result = OperationQueue(workers), torch.zeros(3)
    weakref.finalize(result, gone.set)
    work = Work(queue, go.wait, [result])
    work.start(run_in_caller=False)
    del work, result
    assert gone.is_set()
    go.set()
    workers.request_stop()
