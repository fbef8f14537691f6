"""ZeRO stage 2: reduce and free each block's gradients during backward.

In stage 2 a rank keeps full gradients of one block at a time. Extend stage 1: reduce the flat gradient of a block as
soon as its backward is over, in every micro-batch, so that only this rank's shard of the sum stays.

model, blocks, group: as in stage 1. Backward runs from the last block to the first; flat_params has them in
this order, and the other parameters last. finish_micro_batch is called after each backward.
Example: blocks 0, 1 and 2 of 1 MB of gradients each, on 4 ranks. Full gradients and shards in memory when
    the backward of block 2 begins   0 MB         block 1   0.25 MB       block 0   0.5 MB
    it has ended                     0.75 MB      after the next micro-batch also 0.75 MB; in stage 1 it is 3 MB

Checked: parameters after three steps on 1 to 4 ranks against AdamW on the whole model in float64, with 1, 2 and 4
micro-batches, ranks without samples and other start values on each rank; the memory when the backward of each block
begins, in the first and the second micro-batch; bytes sent: one reduce-scatter per flat parameter and micro-batch, and
one all-gather per step; and that a gradient of a block that is reduced already raises RuntimeError.

You may call:
    self.reduce_until(number)   reduces the first `number` flat gradients of flat_params, except those reduced already
    self.flat_params, self.num_reduced, self.ready   as in stage 1: num_reduced is a number, ready a set of names
    module.register_full_backward_pre_hook(hook)   calls hook(module, grad_outputs) before the module's backward

Check it with: python -m exercises check zero_stage_two

Stub d2adaccd.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from minidist.comm import Group
from minidist.zero.simple import ZeroStage1


class ZeroStage2(ZeroStage1):
    """Stage 1 that also reduces the flat gradient of each block, and frees it, when the block's backward is over."""

    reduces_each_micro_batch = True

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        raise NotImplementedError("let every block reduce the gradients of those behind it")

    def finish_micro_batch(self, chunk: int | None = None) -> None:
        raise NotImplementedError("reduce the remaining gradients, and begin again")
