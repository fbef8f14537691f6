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
* where no gradient came is whatever memory held
* the first micro-batch, which ends in the shard itself, is added to it as well
* the sum is kept in the format in which gradients travel
* the row is all-reduced, twice the bytes, and the shard cut out of it
* the package's own under the learner's name
* the shard is full of ones
* ranks that hold the same shard never sum it
* shards are summed over their copies in every micro-batch, and once more at the end
* the mean over the ranks instead of the sum
* after a step without a micro-batch the gradient of the step before is there
* what comes after the first micro-batch is never added
* a row is given back when the next one takes its place, so that every part of the model keeps one
* gradients are kept after they are sent, and those of the next micro-batch are added to them
* each micro-batch takes the place of the one before
* the last of three or more ranks forgets all micro-batches but the first
* the padding is whatever memory held
* parts of a gradient are added up in the format in which they come
* a rank without a gradient sends nothing, and the others wait
* the row stays, and is reduced at the end of the step, as in stage 1
* the row is there, mostly empty, from the first gradient on
* one row for all micro-batches, which nobody gives back
* of a gradient that comes in two parts the first is lost
* the shard is made before the first gradient comes
* the shard stays when the step is over, and is emptied for the next
* the second step is added to the first
* launch() waits for what it has just launched
* the shard is zero
"""

import torch
from torch import Tensor

from minidist.zero.flat_param import FullGradients


class ShardedGradients(FullGradients):
    """Gradients at full length only while in flight, and accumulated in a shard until the step ends (stages 2 and 3).

    Until a micro-batch's gradients are complete, each is kept as autograd returned it.
    row: None unless in flight. result: None before the first reduction of a step completes, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self._come: dict[str, Tensor] = {}
        self.row = self.result = None

    def held(self) -> list[Tensor | None]:
        return [*self._come.values(), *super().held()]

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of any shape and dtype. Takes ownership: the caller must not use `grad` again."""
        if name in self._come:
            grad = self._come[name].to(self.formats.accumulate).add_(grad)
        self._come[name] = grad

    def _make_flat_gradient(self) -> Tensor:
        """Move the gradients of this micro-batch to a new flat buffer, (numel,), with zeros for missing ones."""
        row = torch.empty(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        row[row.numel() - self.layout.padding :].zero_()  # padding is sent too
        for name, slot in self.layout.slots.items():
            part, grad = row[slot.start : slot.stop], self._come.pop(name, None)
            if grad is None:
                part.zero_()
            else:
                part.view_as(grad).copy_(grad)
        return row

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    def launch(self) -> None:
        self.wait()
        self.row = self._reduce(self._make_flat_gradient(), self._make_shard())

    def wait(self) -> None:
        """Wait for the reduction in flight and add it to `result`."""
        if self._arriving is None:
            return
        arrived = self._arriving[2]
        super().wait()
        self.row = None
        if self.result is None:
            self.result = arrived
        elif arrived is not self.result:  # the sum over replicas is in place
            self.result.add_(arrived)

    def start_finish(self) -> None:
        self.wait()
        if self.result is None:  # the step had no micro-batch
            self.result = self._make_shard().zero_()
        self.sum_replicas()

    def clear(self) -> None:
        self.result = None
