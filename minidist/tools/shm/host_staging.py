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
    """A process group for GPU tensors: it runs the methods of `group`, a CPU process group, on copies in host memory.

    Any method of `group` that starts an operation may be called; it returns a `HostStagedWork`. The method's first
    argument must be the tensors that receive the results, which are copied back to the GPU (for `send`: the tensors to
    send).
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def shutdown(self) -> None:
        """Do nothing: the wrapped CPU process group owns all resources."""

    abort = shutdown

    def __getattr__(self, name: str):
        def call_with_host_copies(first, *rest, **options):
            pairs: list[tuple[Tensor, Tensor]] = []
            host_arguments = [
                _copy_to_host(argument, pairs if i == 0 else []) for i, argument in enumerate((first, *rest))
            ]
            work = HostStagedWork(
                getattr(self._group, name)(*host_arguments, **options), [] if name == "send" else pairs
            )
            self._group.replace_last_coalesced_work(work)
            return work

        return call_with_host_copies


class HostStagedWork(dist.Work):
    """The `dist.Work` of an operation that ran on host copies of GPU tensors; `wait` copies the results to the GPU.

    inner: the work of the operation on the host copies. pairs: (GPU tensor, its host copy) of each result.
    """

    def __init__(self, inner: dist.Work, pairs: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self._inner, self._pairs, self._lock = inner, list(pairs), threading.Lock()
        self._results = [gpu_tensor for gpu_tensor, _ in pairs]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has ended and its results are on the GPU; return True.

        Raises the operation's error if it failed. timeout: limit for the operation, not for the copy to the GPU; zero
        means no limit other than the timeout of the process group.
        """
        done = self._inner.wait(timeout)
        self._copy_results_to_gpu()
        return done

    def synchronize(self) -> None:
        """Block the host until the operation's results are on the GPU, as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Block the host, not the CUDA stream, until the results are on the GPU, because this thread copies them."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of result tensors, which completes once they are on the GPU."""
        return self._inner.get_future().then(self._copy_results_or_raise)

    def get_future_result(self) -> torch.futures.Future:
        """Return the same future as `get_future`: its value is the list of results, not a `WorkResult` as in torch."""
        return self.get_future()

    def is_completed(self) -> bool:
        """Return whether the operation on host memory has ended. Its results reach the GPU only in `wait`."""
        return self._inner.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._inner.is_success()

    def exception(self):
        """Return the exception that the operation raised; None if it raised none or has not ended."""
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        """Return the GPU tensors that receive the results; they are valid after `wait`."""
        return self._results

    def source_rank(self) -> int:
        """Return the group rank of the sender for a receive, else -1."""
        return self._inner.source_rank()

    _source_rank = source_rank

    def _copy_results_or_raise(self, ended: torch.futures.Future) -> list[Tensor]:
        """Copy the results to the GPU and return them; raise the error of the operation if it failed."""
        ended.value()  # raises the error of the operation
        self._copy_results_to_gpu()
        return self._results

    def _copy_results_to_gpu(self) -> None:
        """Copy each result from host memory to its GPU tensor, once. Blocks."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for gpu_tensor, host_copy in pairs:
                gpu_tensor.copy_(host_copy)  # blocks until the copy is done, so every stream reads the new data


def _copy_to_host(argument, pairs: list[tuple[Tensor, Tensor]]):
    """Return the argument with host copies of its tensors; append each (tensor, copy) to `pairs`."""
    if isinstance(argument, Tensor):
        host_copy = torch.empty_like(argument, device="cpu", pin_memory=torch.cuda.is_available())
        host_copy.copy_(argument)  # waits for the current stream
        pairs.append((argument, host_copy))
        return host_copy
    if isinstance(argument, (list, tuple)):
        return [_copy_to_host(one, pairs) for one in argument]
    return argument
