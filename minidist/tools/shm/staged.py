"""Tensors of a GPU through memory of the host: down, the operation there, and up again.

This is how ranks that share one GPU talk where nccl refuses them. Every copy is finished before the next step begins,
so no stream can overtake another: it is made to be right for learners with one GPU, and nobody with two needs it.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Staged:
    """A group's operations for tensors on a GPU. Every method of the group may be called; what is first is written."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def shutdown(self) -> None:
        """Nothing to do: all that there is belongs to the group."""

    abort = shutdown

    def __getattr__(self, name: str):
        def through(first, *rest, **options):
            pairs: list[tuple[Tensor, Tensor]] = []
            lowered = [_down(argument, pairs if i == 0 else []) for i, argument in enumerate((first, *rest))]
            work = StagedWork(getattr(self._group, name)(*lowered, **options), [] if name == "send" else pairs)
            self._group.replace_last(work)
            return work

        return through


class StagedWork(dist.Work):
    """An operation on copies: when it has ended, its results go up, once, before anybody is told."""

    def __init__(self, inner: dist.Work, pairs: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self._inner, self._pairs, self._lock = inner, list(pairs), threading.Lock()
        self._results = [above for above, _ in pairs]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._inner.wait(timeout)
        self._raise_up()
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
        ended.value()  # raises what went wrong
        self._raise_up()
        return self._results

    def _raise_up(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for above, below in pairs:
                above.copy_(below)  # blocks until it is there: whatever stream reads it next, reads it


def _down(argument, pairs: list[tuple[Tensor, Tensor]]):
    """The argument with copies in place of its tensors; which stands for which is noted."""
    if isinstance(argument, Tensor):
        below = torch.empty_like(argument, device="cpu", pin_memory=torch.cuda.is_available())
        below.copy_(argument)  # after all that the current stream was given
        pairs.append((argument, below))
        return below
    if isinstance(argument, (list, tuple)):
        return [_down(one, pairs) for one in argument]
    return argument
