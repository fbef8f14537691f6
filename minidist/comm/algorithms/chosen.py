"""An algorithm of this folder in the place of the backend's all-reduce, with an asynchronous form for gradients."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm.group import Group


class Chosen:
    """What `Group.algorithm` holds: the door's `all_reduce` of that group goes here.

    An asynchronous operation runs when somebody waits for it. It is the simplest form that is correct: rounds of
    transfers need someone to start the next one, and a second thread would write on this rank's board and meter, which
    have one writer each. The price is overlap: gradients travel after backward, not inside it.

    Operations run in the order of launch, which is the same on every rank, whichever is waited for first.
    """

    def __init__(self, all_reduce: Callable[[Tensor, Group, str], None]):
        self.all_reduce = all_reduce
        self._launched: deque[Later] = deque()

    def __call__(self, tensor: Tensor, group: Group, op: str, async_op: bool) -> "Later | None":
        """The door's `all_reduce` for a group of more than one rank."""
        later = Later(lambda: self.all_reduce(tensor, group, op), tensor, self._launched)
        self._launched.append(later)
        return later if async_op else later.wait()


class Later:
    """A handle on an operation that runs when it, or one launched after it, is waited for."""

    def __init__(self, run: Callable[[], None], tensor: Tensor, launched: "deque[Later]"):
        self._run, self._tensor, self._launched = run, tensor, launched

    def wait(self, host: bool = False) -> None:
        """Return when the result may be used: by what is queued on the device, or with `host` by Python as well.

        Raises CommError when the operation, or one before it, failed.
        """
        while self._run is not None:
            first = self._launched[0]
            first._run()
            first._run = None
            self._launched.popleft()
        if host and self._tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
