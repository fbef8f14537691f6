"""ZeRO stage 2: reduce and free each block's gradients during backward: the solution, as it stands in
minidist.simple.zero.

Stage 1 keeps gradients of full length. Stage 2 keeps a shard, from the first reduction to the end of the step: every
micro-batch is reduced separately, and the output is added to the shard. The price is one reduce-scatter per micro-
batch instead of one per step, so k micro-batches send k times as many bytes.

All ranks launch their collectives in the same order without any message about it: always from the last block to the
first, whatever the order in which autograd returns gradients. A rank without a gradient sends zeros, because the
others wait for its part. The shard saves nothing by itself: what counts is that the full gradients of a block are
freed before the next block computes its own.

Usual wrong answers:
* the package's own
* every gradient of a block is one
* reduces a block with its first gradient
* reduces a complete block only if there are other gradients as well: never on a stage without a root
* leaves a block that was complete before a later one until another gradient comes
* does not begin again after a micro-batch: the gradients of later ones are never reduced
* reduces whichever block is complete: ranks whose gradients come in another order wait for each other's blocks
* counts the reduced blocks elsewhere, so `pending` lists all blocks at any time
* reduces all blocks after backward, when all of their gradients are in memory
* as stage 1: accumulates full gradients over all micro-batches, and reduces once
* reduces every block once more after backward, with zeros
* does not reduce a block that has not got all its gradients: right only when every rank uses every parameter
* clear makes no block pending again that an aborted step has reduced
* does not reduce the parameters outside all blocks
* reduces the root after every micro-batch
* reduces the root without looking whether there is one
* keeps the count of a block that a micro-batch left incomplete, so that the next one reduces it too early
* every gradient of a block is zero
"""

from torch import Tensor

from minidist.simple.zero import ZeroStage1


class ZeroStage2(ZeroStage1):
    """Stage 1 that reduces the gradients of each block as soon as its backward is over, and then frees them.

    A rank has the unreduced gradients of at most one block at a time, at the price of one reduce-scatter per block and
    micro-batch. The root's are reduced at the end of the step: the gradient of an embedding that another pipeline stage
    shares is complete then.

    pending: the blocks that are not yet reduced in this micro-batch. Every rank reduces them from the last one on,
    which is the order of backward.
    """

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        super().clear()
        self.pending = list(self.blocks)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; reduce pending blocks, from the last one on, while their gradients are complete."""
        super().add(name, gradient)
        while self.pending and self.local.keys() >= self.pending[-1].parameters.keys():
            self.reduce(self.pending.pop())

    def end_micro_batch(self) -> None:
        """Collective: reduce the blocks that have not received all their gradients in this micro-batch."""
        for flat in reversed(self.pending):
            self.reduce(flat)
        self.pending[:] = self.blocks

    def reduce_sums(self) -> None:
        """Collective: reduce the root's gradients."""
        if self.root is not None:
            self.reduce(self.root)
