"""The handle that torch gets for an operation in flight."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.tools.shm.operation_queue import Operation, OperationQueue


class Work(dist.Work):
    """The `dist.Work` of one operation: the handle that torch.distributed returns for an operation in flight.

    queue: the `OperationQueue` in which the operation runs. call: performs the operation. tensors: the tensors that
    receive the results. source: for a receive, the group rank of the sender; else -1.
    """

    def __init__(
        self, queue: OperationQueue, call: Callable[[], None], tensors: Sequence[Tensor] = (), source: int = -1
    ):
        super().__init__()
        self._queue, self._task, self._tensors, self.source = queue, Operation(call), list(tensors), source

    def start(self, run_in_caller: bool) -> None:
        """Run the operation to its end in the calling thread if `run_in_caller` and its queue is idle; else append it.

        An appended operation runs in its turn, in a worker thread or in a thread that waits for it, and this method
        returns at once. `wait` raises the operation's error; `start` does not.
        """
        self._queue.submit(self._task, run_in_caller)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has ended; return True. Raises the operation's error if it failed.

        timeout: after it DistBackendError is raised; zero for no limit. Without limit, the calling thread runs the
        operation itself if it is first in its queue.
        """
        if not self._task.ended:
            if not timeout:
                self._queue.run_if_next(self._task)
            else:
                self._queue.start_worker()
            if not self._task.wait_until_ended(timeout.total_seconds() if timeout else None):
                raise dist.DistBackendError(f"the operation has not ended after {timeout.total_seconds():g} s")
        if self._task.error is not None:
            raise self._task.error
        return True

    def synchronize(self) -> None:
        """Block until the operation has ended, as `wait` does: tensors on the CPU have no stream to synchronize."""
        self.wait()

    def block_current_stream(self) -> None:
        """Block the calling thread until the operation has ended, as `wait` does; nccl would block only the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._task.ended

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._task.ended and self._task.error is None

    def exception(self):
        """Return the exception that the operation raised; None if it raised none or has not ended."""
        return self._task.error

    def result(self) -> list[Tensor]:
        """Return the tensors that receive the results; they are valid once the operation has ended."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank of the sender for a receive, else -1."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of result tensors; waiting for it raises the error of the operation."""
        return self._task.get_future().then(self._results_or_raise)

    def get_future_result(self) -> torch.futures.Future:
        """Return `get_future()`: a future of the results, not of torch's `WorkResult`."""
        return self.get_future()

    def _results_or_raise(self, _) -> list[Tensor]:
        """Return the result tensors; raise the error of the operation if it failed."""
        if self._task.error is not None:
            raise self._task.error
        return self._tensors
