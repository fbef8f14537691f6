"""Stage 2: free each flat gradient after its reduction.

Write the missing lines of ShardedGradients; its docstring specifies the result.
You may call: FullGradients.wait, FullGradients.launch_replica_all_reduce, _make_shard, _reduce, torch.empty,
Tensor.zero_, Tensor.copy_, Tensor.add_, Tensor.to, Tensor.view_as.
Check it with: python -m exercises check shard_gradients

Stub 55110464.
"""

import torch
from torch import Tensor

from minidist.zero.flat_param import FullGradients


class ShardedGradients(FullGradients):
    """Gradients of a flat parameter, at full length only in flight, accumulated in this rank's shard (stages 2, 3).

    Until all gradients of a micro-batch have been added, each is kept as autograd returned it. full_buffer: None unless
    in flight. result: None until the first reduction of a step has completed, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self._local_grads: dict[str, Tensor] = {}
        self.full_buffer = self.result = None

    def live_tensors(self) -> list[Tensor | None]:
        return [*self._local_grads.values(), *super().live_tensors()]

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name`. Takes ownership: the caller must not use `grad` again."""
        raise NotImplementedError("keep the gradient, or add it to the earlier one of this parameter")

    def _make_flat_gradient(self) -> Tensor:
        """Move the gradients of this micro-batch to a new flat buffer, (numel,), with zeros for missing ones."""
        raise NotImplementedError("copy the gradients into a new flat gradient; everything else is zero")

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard_numel, dtype=self.dtypes.accumulate, device=self.device)

    def launch(self) -> None:
        self.wait()
        raise NotImplementedError("start to reduce the flat gradient of this micro-batch into a shard")

    def wait(self) -> None:
        """Wait for the reduction in flight and add it to `result`."""
        if self._in_flight is None:
            return
        raise NotImplementedError("wait; the output becomes the result, or is added to it")

    def launch_final_reduction(self) -> None:
        self.wait()
        raise NotImplementedError("the gradient of a step without a micro-batch is zero")
        self.launch_replica_all_reduce()

    def clear(self) -> None:
        self.result = None
