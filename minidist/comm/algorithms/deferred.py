"""An all-reduce of this folder in place of the backend's, with the asynchronous form that gradient reduction needs."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm.group import Group


class DeferredAllReduce:
    """Makes a synchronous all-reduce usable as `Group.algorithm`, in place of the backend's all-reduce.

    all_reduce: called as `all_reduce(tensor, group, op)`; for example `ring.all_reduce`.
    A call with `async_op` sends nothing and returns a handle, whose first `wait()` runs the all-reduce, after all
    earlier ones. So every rank runs them in the same order. Nothing overlaps with backward. A second thread could
    overlap, but rank status and meter allow only one thread to write.
    """

    def __init__(self, all_reduce: Callable[[Tensor, Group, str], None]):
        self.all_reduce = all_reduce
        self._pending: deque[DeferredHandle] = deque()

    def __call__(self, tensor: Tensor, group: Group, op: str, async_op: bool) -> "DeferredHandle | None":
        """Reduce `tensor` over a group of more than one rank; arguments as in `collectives.all_reduce`."""
        later = DeferredHandle(lambda: self.all_reduce(tensor, group, op), tensor, self._pending)
        self._pending.append(later)
        return later if async_op else later.wait()


class DeferredHandle:
    """The handle of one all-reduce that `DeferredAllReduce` has deferred.

    run: runs the all-reduce of `tensor`. pending: the handles of the `DeferredAllReduce` whose
    all-reduce has not run, in launch order.
    """

    def __init__(self, run: Callable[[], None], tensor: Tensor, pending: "deque[DeferredHandle]"):
        self._run, self._tensor, self._pending = run, tensor, pending

    def wait(self, host: bool = False) -> None:
        """Run this all-reduce and those launched before it, unless they have run already; then the result may be used.

        host: on CUDA, also block the host until the result is in memory. Raises CommError if a transfer failed.
        """
        while self._run is not None:
            first = self._pending[0]
            first._run()
            first._run = None
            self._pending.popleft()
        if host and self._tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
