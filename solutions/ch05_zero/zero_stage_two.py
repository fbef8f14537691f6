"""ZeRO stage 2: reduce and free each block's gradients during backward: the solution, as it stands in
minidist.zero.simple.

Stage 1 keeps gradients of full length. Stage 2 keeps a shard, from the first reduction to the end of the step: every
micro-batch is reduced separately, and the output is added to the shard. The price is one reduce-scatter per micro-
batch instead of one per step, so k micro-batches send k times as many bytes.

When the backward of a block begins, that of all later blocks is over, on every rank and in the same order; so all
ranks launch their collectives in the same order without any message about it. A rank without a gradient sends zeros,
because the others wait for its part. The shard saves nothing by itself: what counts is that the full gradients of a
block are freed before the next block computes its own.

Usual wrong answers:
* halves the sum with every micro-batch
* the package's own
* every gradient is one
* does not begin again after a micro-batch: later ones are refused
* all-gathers the parameters after every micro-batch, although they have not changed
* every hook sees the last value of the loop variable, and reduces blocks before their backward
* each micro-batch replaces the shard of the one before
* does not reset the number of reduced gradients: later micro-batches are never reduced
* reduces a block when its own backward begins
* reduces a block only when the backward of the second next begins: two blocks of full gradients
* counts the blocks from the first: reduces the last ones before their backward
* does not reduce the parameters outside all blocks
* reduces all gradients after backward, when all of them are in memory
* as stage 1: accumulates full gradients over all micro-batches, and reduces once
* every gradient is zero
"""

from collections.abc import Mapping, Sequence

from torch import nn

from minidist.comm import Group
from minidist.zero.simple import ZeroStage1


class ZeroStage2(ZeroStage1):
    """Stage 1 that also reduces the flat gradient of each block, and frees it, when the block's backward is over."""

    reduces_each_micro_batch = True

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        super().__init__(model, blocks, group)
        for number, block in enumerate(reversed(blocks)):  # when its backward begins, that of `number` blocks is over
            block.register_full_backward_pre_hook(lambda *_, number=number: self.reduce_until(number))

    def finish_micro_batch(self, chunk: int | None = None) -> None:
        self.reduce_until(len(self.flat_params))
        self.ready, self.num_reduced = set(), 0
