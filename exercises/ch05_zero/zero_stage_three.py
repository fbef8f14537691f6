"""ZeRO stage 3: gather parameters before use, free them after.

In stage 3 a rank stores its shard of the parameters only. Extend stage 2: gather the parameters of a block before its
forward and again before its backward, and free them after each, although the model and autograd still refer to them.

model, blocks, group: as in stage 1. The last of flat_params has the parameters outside all blocks: they are gathered
while the model itself runs. gatherer: this object, which tells the trainer that all ranks must run every micro-batch.
Example: blocks 0, 1 and 2 of 1 MB, little else, 4 ranks. Parameters in memory:
    between steps  0.75 MB      in forward and backward of any block  1.75 MB      in stages 1 and 2  3 MB
    full.untyped_storage().nbytes()   0 after free(flat), and full.numel() * full.element_size() after gather(flat)

Checked: masters and outputs over three steps on 1 to 4 ranks against AdamW on the whole model in float64, with ranks
that start from other values; memory before the first step, in the forward and backward of each block in two
micro-batches, between steps, after a forward under no_grad and after gather_all; bytes sent: at most two all-gathers
and one reduce-scatter per flat parameter and micro-batch, and nothing after the update.

You may call:
    tensor.untyped_storage().resize_(nbytes)   frees memory (0) or allocates it anew; views of the tensor stay views
    all_gather(output, input, group)   concatenates the (n,) of all ranks in (size * n,)
    module.register_forward_pre_hook(hook), module.register_forward_hook(hook)   before and after its forward
    module.register_full_backward_pre_hook(hook)   before its backward; hooks run in the order of registration
    tensor.clone(); tensor.data = other   gives the same tensor object other memory

Check it with: python -m exercises check zero_stage_three

Stub 1a15b511.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from minidist.comm import Group, all_gather
from minidist.parallel.data.reducer import GradientReducer
from minidist.zero.simple import FlatParameter, ZeroStage2


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers the parameters of each block before its forward and backward, and frees them after."""

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        raise NotImplementedError("store shards only, and register the hooks")

    def reduce_until(self, number: int) -> None:
        raise NotImplementedError("reduce, and free the parameters whose backward is over")

    def gather(self, flat: FlatParameter) -> None:
        """Collective: give the buffer memory again, and all-gather it; its views are valid again."""
        raise NotImplementedError("allocate the buffer and gather it")

    def free(self, flat: FlatParameter) -> None:
        raise NotImplementedError("free the memory of the buffer")

    def gather_all(self) -> None:
        raise NotImplementedError("gather all")

    gather_params = GradientReducer.gather_params  # do nothing: each block is gathered when it runs
