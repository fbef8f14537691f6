"""Torch's handle for an operation on its way."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.tools.shm.lane import Lane, Task


class Work(dist.Work):
    """An operation in a lane.

    call: what to do; tensors: the results; source: the rank that a receive is from.
    """

    def __init__(self, lane: Lane, call: Callable[[], None], tensors: Sequence[Tensor] = (), source: int = -1):
        super().__init__()
        self._lane, self._task, self._tensors, self.source = lane, Task(call), list(tensors), source

    def start(self, here: bool) -> None:
        """Queue it; or, with `here` and nothing before it, do it in this thread and return when it has ended."""
        self._lane.submit(self._task, here)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation has ended; raises what went wrong, or after `timeout` (0: none) that."""
        if not self._task.ended:
            if not timeout:
                self._lane.take_over(self._task)
            else:
                self._lane.man()
            if not self._task.passed(timeout.total_seconds() if timeout else None):
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
        """A future of the list of results. Errors go through `then`, as only its errors are seen from C++."""
        return self._task.future().then(self._outcome)

    def get_future_result(self) -> torch.futures.Future:
        return self.get_future()

    def _outcome(self, _) -> list[Tensor]:
        if self._task.error is not None:
            raise self._task.error
        return self._tensors
