"""The handle that torch gets for an operation in flight."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.tools.shm.operation_queue import Operation, OperationQueue


class Work(dist.Work):
    """The `dist.Work` of one operation of an `OperationQueue`.

    queue: where it runs; call: performs it; tensors: the results; source: group rank of the sender, for a receive.
    """

    def __init__(
        self, queue: OperationQueue, call: Callable[[], None], tensors: Sequence[Tensor] = (), source: int = -1
    ):
        super().__init__()
        self._queue, self._task, self._tensors, self.source = queue, Operation(call), list(tensors), source

    def start(self, here: bool) -> None:
        """Queue the operation; with `here` and an empty queue, run it in the calling thread until it has ended."""
        self._queue.submit(self._task, here)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has ended; return True. Raises its error, or DistBackendError after `timeout`."""
        if not self._task.ended:
            if not timeout:
                self._queue.run_if_next(self._task)
            else:
                self._queue.run_in_worker()
            if not self._task.wait_ended(timeout.total_seconds() if timeout else None):
                raise dist.DistBackendError(f"the operation has not ended after {timeout.total_seconds():g} s")
        if self._task.error is not None:
            raise self._task.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._task.ended

    def is_success(self) -> bool:
        return self._task.ended and self._task.error is None

    def exception(self):
        return self._task.error

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of results. Errors pass through `then`: C++ sees only those."""
        return self._task.future().then(self._outcome)

    def get_future_result(self) -> torch.futures.Future:
        return self.get_future()

    def _outcome(self, _) -> list[Tensor]:
        if self._task.error is not None:
            raise self._task.error
        return self._tensors
