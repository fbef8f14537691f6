"""Stage 2: free each flat gradient after its reduction: the solution, as it stands in minidist.zero.flat_param.

Stage 1 keeps gradients of full length. Stage 2 keeps a shard, from the first reduction to the end of the step: every
micro-batch is reduced separately, and the output is added to the shard. The price is one reduce-scatter per micro-
batch instead of one per step, so k micro-batches send k times as many bytes.

A flat gradient that is allocated with its first gradient would exist, mostly empty, while backward still needs most
activations. So the gradients are kept separately, and each is freed after its copy into the flat gradient. A flat
gradient whose reduction is in flight must not change until the wait: the next micro-batch needs another buffer. A
rank without a gradient for a flat parameter sends zeros, because the other ranks wait for its part. The padding is
sent too, although no rank reads the result, so it must be initialized: uninitialized memory may contain an infinity,
or a value that overflows in a 16-bit dtype.

Usual wrong answers:
* leaves uninitialized memory where a gradient is missing
* adds the first micro-batch, whose output already is the shard, to it again
* accumulates the sum in the dtype of the messages
* all-reduces the flat gradient, twice the bytes, and takes a slice of it
* the package's own under the learner's name
* the shard is full of ones
* the ranks with the same shard never sum it
* sums shards over their replicas in every micro-batch, and once more at the end
* the mean over the ranks instead of the sum
* a step without micro-batches returns the gradient of the previous step
* never adds later micro-batches
* frees a flat gradient only when the next one replaces it, so every flat parameter keeps one
* keeps gradients after they are sent, and adds the next micro-batch to them
* each micro-batch replaces the previous one
* the last of three or more ranks omits all micro-batches but the first
* leaves the padding uninitialized
* adds two parts of a gradient in the dtype of the gradients
* a rank without a gradient sends nothing, and the others wait
* keeps the flat gradient and reduces it at the end of the step, as in stage 1
* allocates the flat gradient with its first gradient
* one flat gradient for all micro-batches, which is never freed
* if a gradient comes in two parts, the second replaces the first
* allocates the shard before the first gradient
* keeps the shard after the step and zeroes it for the next
* adds the second step to the first
* launch() waits for its own reduction
* the shard is zero
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
        if name in self._local_grads:
            grad = self._local_grads[name].to(self.dtypes.accumulate).add_(grad)
        self._local_grads[name] = grad

    def _make_flat_gradient(self) -> Tensor:
        """Move the gradients of this micro-batch to a new flat buffer, (numel,), with zeros for missing ones."""
        flat_grad = torch.empty(self.layout.numel, dtype=self.dtypes.accumulate, device=self.device)
        flat_grad[flat_grad.numel() - self.layout.padding :].zero_()  # padding is sent too
        for name, slot in self.layout.slots.items():
            view, grad = flat_grad[slot.start : slot.stop], self._local_grads.pop(name, None)
            if grad is None:
                view.zero_()
            else:
                view.view_as(grad).copy_(grad)
        return flat_grad

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard_numel, dtype=self.dtypes.accumulate, device=self.device)

    def launch(self) -> None:
        self.wait()
        self.full_buffer = self._reduce(self._make_flat_gradient(), self._make_shard())

    def wait(self) -> None:
        """Wait for the reduction in flight and add it to `result`."""
        if self._in_flight is None:
            return
        target = self._in_flight[2]
        super().wait()
        self.full_buffer = None
        if self.result is None:
            self.result = target
        elif target is not self.result:  # the sum over replicas is in place
            self.result.add_(target)

    def launch_final_reduction(self) -> None:
        self.wait()
        if self.result is None:  # the step had no micro-batch
            self.result = self._make_shard().zero_()
        self.launch_replica_all_reduce()

    def clear(self) -> None:
        self.result = None
