"""Host staging: copy GPU tensors to pinned host memory, communicate there, copy the results back.

Ranks that share one GPU communicate like this where nccl refuses them. Every copy completes before the next step
begins, so streams cannot race: it is correct rather than fast, for learners with a single GPU.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class HostStagedGroup:
    """Forwards every method of `group` with host copies of its GPU tensors; the first argument holds the results."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def shutdown(self) -> None:
        """Do nothing: `group` owns all resources."""

    abort = shutdown

    def __getattr__(self, name: str):
        def through(first, *rest, **options):
            pairs: list[tuple[Tensor, Tensor]] = []
            lowered = [_copy_to_host(argument, pairs if i == 0 else []) for i, argument in enumerate((first, *rest))]
            work = HostStagedWork(getattr(self._group, name)(*lowered, **options), [] if name == "send" else pairs)
            self._group.replace_last_coalesced(work)
            return work

        return through


class HostStagedWork(dist.Work):
    """The work of an operation on host copies; its results are copied to the GPU once, before a wait returns.

    pairs: (GPU tensor, host copy).
    """

    def __init__(self, inner: dist.Work, pairs: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self._inner, self._pairs, self._lock = inner, list(pairs), threading.Lock()
        self._results = [above for above, _ in pairs]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._inner.wait(timeout)
        self._copy_results_to_gpu()
        return done

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        return self._inner.get_future().then(self._outcome)

    def get_future_result(self) -> torch.futures.Future:
        return self.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self):
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        return self._results

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank

    def _outcome(self, ended: torch.futures.Future) -> list[Tensor]:
        ended.value()  # raises the error of the operation
        self._copy_results_to_gpu()
        return self._results

    def _copy_results_to_gpu(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for above, below in pairs:
                above.copy_(below)  # blocks until the copy is done, so every stream reads the new data


def _copy_to_host(argument, pairs: list[tuple[Tensor, Tensor]]):
    """Return the argument with host copies of its tensors; append each (tensor, copy) to `pairs`."""
    if isinstance(argument, Tensor):
        below = torch.empty_like(argument, device="cpu", pin_memory=torch.cuda.is_available())
        below.copy_(argument)  # waits for the current stream
        pairs.append((argument, below))
        return below
    if isinstance(argument, (list, tuple)):
        return [_copy_to_host(one, pairs) for one in argument]
    return argument
