"""ZeRO stage 2: reduce and free each block's gradients during backward.

In stage 2 a rank keeps full gradients of one block at a time. Extend stage 1: reduce the gradients of a block as soon
as all of them have been added, in every micro-batch, so that only this rank's shard of the sum stays.

The constructor is that of stage 1. Backward adds the gradients from the last block to the first, those of a block in
any order. All ranks must launch their reduce-scatters in the same order: a block whose gradients are complete waits
until all later blocks have been reduced. `pending` lists, between two calls, the blocks that are not yet reduced in
this micro-batch. end_micro_batch, which the trainer calls after each backward, reduces them, from the last one on. The
root is reduced once, at the end of the step, if there is one: its gradients stay in `local` over all micro-batches.
Example: blocks 0, 1 and 2 of 1 MB of gradients each, on 4 ranks, so that the shards of the sums have 0.75 MB.
    gradients in memory when the backward of block 2, 1 or 0 begins   0.75 MB; in stage 1   0.75, 1.75 and 2.75 MB
    after the first and after every later micro-batch                 0.75 MB; in stage 1   3.75 MB
    reduce-scatters of a step with 4 micro-batches                    4 per block, 1 of the root

Checked: parameters after three steps on 1 to 4 ranks against AdamW on the whole model in float64, with 1, 2 and 4
micro-batches, ranks without samples, which add no gradients, and other start values on each rank; memory when the
backward of each block begins and after each micro-batch; bytes sent; when and in which order blocks are reduced, with
gradients that are added by hand in other orders, with a block that gets none in a micro-batch, and after an aborted
step; a model without a root; and up to 7 ranks, and a group of only some ranks.

You may call:
    self.reduce(flat)   as in stage 1: takes the gradients of a flat parameter out of self.local and reduces them
    self.local, self.blocks, self.root   as in stage 1; flat.parameters   a dictionary by name
    super().add(name, gradient), super().clear()   those of stage 1

Check it with: python -m exercises check zero_stage_two

Stub c4240220.
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
        raise NotImplementedError("forget all gradients; all blocks are pending")

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; reduce pending blocks, from the last one on, while their gradients are complete."""
        raise NotImplementedError("add the gradient, and reduce the blocks that are complete")

    def end_micro_batch(self) -> None:
        """Collective: reduce the blocks that have not received all their gradients in this micro-batch."""
        raise NotImplementedError("reduce the remaining blocks, and begin again")

    def reduce_sums(self) -> None:
        """Collective: reduce the root's gradients."""
        raise NotImplementedError("reduce the root")
