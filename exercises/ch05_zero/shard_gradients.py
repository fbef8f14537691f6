"""Stage 2: free each flat gradient after its reduction.

Write the missing lines of ShardedGradients; its docstring specifies the result.
You may call: FullGradients.wait, FullGradients.sum_replicas, _make_shard, _reduce, torch.empty, Tensor.zero_,
Tensor.copy_, Tensor.add_, Tensor.to, Tensor.view_as.
Check it with: python -m exercises check shard_gradients

Stub fe9e8caf.
"""

import torch
from torch import Tensor

from minidist.zero.flat_param import FullGradients


class ShardedGradients(FullGradients):
    """Gradients of full length only while a micro-batch's are sent; a shard of them from there to the step's end.

    A gradient is kept as it came, and in its own format, until all of the row are there.
    row: None but while it is on its way. result: None until the first reduction of a step has ended, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self._come: dict[str, Tensor] = {}
        self.row = self.result = None

    def held(self) -> list[Tensor | None]:
        return [*self._come.values(), *super().held()]

    def add(self, name: str, grad: Tensor) -> None:
        """One contribution of this rank, of any shape and format; it is kept as it is, and no longer the caller's."""
        raise NotImplementedError("keep the gradient, or add it to the earlier one of this parameter")

    def _make_flat_gradient(self) -> Tensor:
        """What has come, (numel,), which is forgotten; zero where nothing has."""
        raise NotImplementedError("copy the gradients into a new flat gradient; everything else is zero")

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    def launch(self) -> None:
        self.wait()
        raise NotImplementedError("start to reduce the flat gradient of this micro-batch into a shard")

    def wait(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        raise NotImplementedError("wait; the output becomes the result, or is added to it")

    def start_finish(self) -> None:
        self.wait()
        raise NotImplementedError("the gradient of a step without a micro-batch is zero")
        self.sum_replicas()

    def clear(self) -> None:
        self.result = None
