"""ZeRO stage 3: gather parameters before use, free them after.

In stage 3 a rank stores its shard of the parameters only. Extend stage 2: gather the parameters of a block before its
forward and again before its backward, and free them after each. With prefetch, the next block's gather is in flight
while a block computes.

parameters, masters, blocks, group: as in stage 1; a key of `blocks` is the module that gets hooks. gather_block(index,
following) gathers block `index` before it computes and, with prefetch, starts the gather of block `following`, if there
is one: the next in forward, the one before in backward. `reduce` also frees the block or root, whose backward is over.
Before the first micro-batch of a step or an evaluation, the trainer calls gather_root, also if there is no root; the
root stays gathered until its reduction, which frees it. After an evaluation it calls free_root, which frees all flat
parameters. Between steps, and after the constructor, only shards have memory; update_parameters of stage 1 gathers
nothing, because shards_parameters is True.
Example: blocks 0, 1 and 2, with prefetch. A block's memory is allocated when its gather starts.
    the forward of block  0 computes: 0 and 1 have memory, 1 in flight   1: 1 and 2    2: 2
    the backward of block 2 computes: 2 and 1 have memory, 1 in flight   1: 1 and 0    0: 0
    of 1 MB each, on 4 ranks: 0.75 MB of parameters between steps, at most 2.75 MB while a block computes

Checked: masters and outputs over three steps on 1 to 4 ranks against AdamW on the whole model in float64, with and
without prefetch, ranks that start from other values, and ranks without samples, which run every micro-batch; memory
before the first step, in the forward and backward of each block in two micro-batches, after `finish`, between steps; a
model without a root; which blocks have memory and how many gathers are in flight when a block begins to compute; bytes
sent: two all-gathers and one reduce-scatter per block and micro-batch, one of each for the root, nothing after the
update; free_root after forwards under no_grad and after gather_block(0, 1), which leaves no gather that nobody waited
for; and up to 7 ranks, and a group of only some ranks.

You may call:
    flat.start_gather(), flat.wait(), flat.free()   as in exercise 5.2; start_gather does nothing if it has memory
    self.blocks[index], self.root, self.flat_params   as in stage 1: flat parameters; the root may be None
    module.register_forward_pre_hook(hook), module.register_forward_hook(hook)   before and after its forward
    module.register_full_backward_pre_hook(hook)   before its backward; each calls hook(module, ...)
    super().reduce(flat)   that of stage 1

Check it with: python -m exercises check zero_stage_three

Stub a214a988.
"""

from minidist.comm import Group
from minidist.simple.data_parallel import Tensors
from minidist.simple.zero import Blocks, FlatParameter, ZeroStage2


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers each block's parameters before its forward and its backward, and frees them after.

    prefetch: start the all-gather of the next block while this one computes.
    """

    shards_parameters = True

    def __init__(self, parameters: Tensors, masters: Tensors, blocks: Blocks, group: Group, prefetch: bool = True):
        raise NotImplementedError("free the buffers, and register the hooks of each block")

    def gather_block(self, index: int, following: int) -> None:
        """Collective: gather a block that is about to compute. following: the one after it, whose gather may start."""
        raise NotImplementedError("gather the block, and start the gather of the following one")

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the gradients of a flat parameter; free its parameters: their backward is over."""
        raise NotImplementedError("reduce, and free the parameters")

    def gather_root(self) -> None:
        """Collective: gather the embedding, final norm and head, for the whole step or evaluation."""
        raise NotImplementedError("gather the root")

    def free_root(self) -> None:
        """Free the root's parameters, and those of a block that was gathered ahead and not used."""
        raise NotImplementedError("free all flat parameters")
