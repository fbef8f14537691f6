"""A row of gradients only while backward is in it.

Write the missing lines of ShardGradients; the docstring says what is asked.
You may call: WholeGradients.add, WholeGradients.settle, WholeGradients.sum_copies, WholeGradients.clear, _set_row,
_make_shard, _reduce_into, torch.empty, Tensor.zero_, Tensor.add_.
Check it with: python -m exercises check shard_gradients

Stub 277e494a.
"""

import torch
from torch import Tensor

from minidist.zero.gradients import WholeGradients


class ShardGradients(WholeGradients):
    """Gradients of full length only inside the backward of a micro-batch; a shard of them from there to the step's end.

    result: None until the first reduction of a step has ended, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self.row, self.views, self.result = None, {}, None

    def add(self, name: str, grad: Tensor) -> None:
        if self.row is None:
            self._make_row()
        super().add(name, grad)

    def _make_row(self) -> None:
        raise NotImplementedError("make a row of full length; what nobody fills is zero")

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    def launch(self) -> None:
        self.settle()
        raise NotImplementedError("reduce the row of this micro-batch, and have none")

    def settle(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        raise NotImplementedError("wait; it is the result, or is added to it")

    def begin_finish(self) -> None:
        self.settle()
        raise NotImplementedError("a step without a micro-batch has a gradient of zero")
        self.sum_copies()

    def clear(self) -> None:
        super().clear()
        self.result = None
