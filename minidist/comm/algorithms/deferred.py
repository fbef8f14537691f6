"""An all-reduce of this folder in place of the backend's, with the asynchronous form that gradient reduction needs."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm.group import Group


class DeferredAllReduce:
    """Gives a synchronous all-reduce the asynchronous form that `Group.algorithm` needs.

    With `group.algorithm = DeferredAllReduce(ring.all_reduce)`, `collectives.all_reduce` on `group` calls it instead of
    the backend. all_reduce: called with the tensor, the group and the name of the reduction.

    An asynchronous operation is deferred until the first `wait()`. This is the simplest correct form: each round must
    be started after the last, and a second thread would write to this rank's status page and meter, which have one
    writer each. The price is overlap: gradients are reduced after backward, not during it.

    Operations run in launch order, which is the same on every rank, whichever handle is waited for first.
    """

    def __init__(self, all_reduce: Callable[[Tensor, Group, str], None]):
        self.all_reduce = all_reduce
        self._launched: deque[DeferredHandle] = deque()

    def __call__(self, tensor: Tensor, group: Group, op: str, async_op: bool) -> "DeferredHandle | None":
        """Reduce `tensor` over a group of more than one rank; arguments as in `collectives.all_reduce`."""
        later = DeferredHandle(lambda: self.all_reduce(tensor, group, op), tensor, self._launched)
        self._launched.append(later)
        return later if async_op else later.wait()


class DeferredHandle:
    """Handle of an operation that runs in its own `wait`, or in the `wait` of an operation launched later."""

    def __init__(self, run: Callable[[], None], tensor: Tensor, launched: "deque[DeferredHandle]"):
        self._run, self._tensor, self._launched = run, tensor, launched

    def wait(self, host: bool = False) -> None:
        """Run this operation and those launched before it, unless they have run; then block until the result is ready.

        host: on CUDA, also block the host until the result is in memory. Raises CommError if an operation failed.
        """
        while self._run is not None:
            first = self._launched[0]
            first._run()
            first._run = None
            self._launched.popleft()
        if host and self._tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
