"""A queue of `shm` by itself, without ranks: who runs an operation, and what he still holds of it."""

import functools
import threading
import weakref

import torch

from minidist.tools.shm.operation_queue import OperationQueue, WorkerThreads
from minidist.tools.shm.work import Work


class NoWorkers:
    """Threads that never come."""

    def run(self, task) -> None:
        pass


def test_who_waits_for_what_is_next_runs_it_himself():
    queue, done = OperationQueue(NoWorkers()), []
    at_once, first, second = (Work(queue, lambda i=i: done.append(i)) for i in range(3))
    at_once.start(here=True)
    assert done == [0] and at_once.is_success()
    first.start(here=False)
    second.start(here=True)  # first is before it
    assert done == [0]
    first.wait()
    assert done == [0, 1]
    second.wait()
    assert done == [0, 1, 2] and queue.idle


class Told:
    """Says, when the last reference to it goes, what `ask` gives then."""

    def __init__(self, ask, answers: list):
        self.ask, self.answers = ask, answers

    def __del__(self):
        self.answers.append(self.ask())


def test_the_thread_that_ran_an_operation_has_let_go_of_its_tensors_before_anybody_knows():
    """Or their memory would be free at some later time, and in another thread than the one that waits."""
    queue, answers = OperationQueue(NoWorkers()), []
    work = Work(queue, functools.partial(bool, Told(lambda: work.is_completed(), answers)))
    work.start(here=False)
    work.wait()
    assert answers == [False]


def test_the_thread_that_runs_an_operation_does_not_hold_its_result():
    workers, go, gone = WorkerThreads(), threading.Event(), threading.Event()
    queue, result = OperationQueue(workers), torch.zeros(3)
    weakref.finalize(result, gone.set)
    work = Work(queue, go.wait, [result])
    work.start(here=False)
    del work, result
    assert gone.is_set()
    go.set()
    workers.close()
