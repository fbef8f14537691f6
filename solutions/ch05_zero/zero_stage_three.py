"""ZeRO stage 3: gather parameters before use, free them after: the solution, as it stands in minidist.zero.simple.

A rank keeps a shard of every block and the full parameters of one. The storage is emptied but the tensor objects are
kept, so the views of the model and of autograd's graph see the data again after the all-gather for backward. A
parameter is gathered twice per micro-batch, before forward and before backward: communication grows by half compared
with stage 2, in exchange for sharding the parameters, the last replicated tensors.

All ranks must run the forward and backward of the same blocks in the same order, even a rank without samples, because
every block is a collective. The update changes shards only; nobody needs the full parameters until the next forward.
The fast version gathers the next block while this one computes, and keeps the last block from its forward to its
backward.

Usual wrong answers:
* gathers all blocks when the model begins
* allocates the memory before backward, but does not gather into it
* frees no block in backward
* the package's own
* a gathered flat parameter is full of ones
* keeps each block from its forward to the end of its backward
* gathers all parameters after the update, as stages 1 and 2 do, and keeps them until they are used
* gathers a block in the middle of its forward once more
* frees nothing: the memory of stage 2 with more messages
* gathers a block for forward only; in backward its memory is freed
* keeps a copy of the parameters when it frees the buffer
* gathers the parameters of the last block for the first: right for the middle block only
* forgets the parameters outside all blocks
* sends nothing before the first update: fills the buffer with what this rank had
* a gathered flat parameter is zero
"""

from collections.abc import Mapping, Sequence

from torch import nn

from minidist.comm import Group, all_gather
from minidist.parallel.data.reducer import GradientReducer
from minidist.zero.simple import FlatParameter, ZeroStage2


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers the parameters of each block before its forward and backward, and frees them after."""

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        super().__init__(model, blocks, group)
        self.gatherer = self
        for flat, module in zip(self.flat_params, [*reversed(blocks), model], strict=True):
            flat.shard = flat.shard.clone()
            for name, place in flat.slices.items():
                self.masters[name].data = flat.shard[place]
            self.free(flat)
            module.register_forward_pre_hook(lambda *_, flat=flat: self.gather(flat))
            module.register_forward_hook(lambda *_, flat=flat: self.free(flat))
            module.register_full_backward_pre_hook(lambda *_, flat=flat: self.gather(flat))

    def reduce_until(self, number: int) -> None:
        super().reduce_until(number)
        for reduced in self.flat_params[:number]:
            self.free(reduced)

    def gather(self, flat: FlatParameter) -> None:
        """Collective: give the buffer memory again, and all-gather it; its views are valid again."""
        flat.full.untyped_storage().resize_(flat.full.numel() * flat.full.element_size())
        all_gather(flat.full, flat.shard, self.group)

    def free(self, flat: FlatParameter) -> None:
        flat.full.untyped_storage().resize_(0)

    def gather_all(self) -> None:
        for flat in self.flat_params:
            self.gather(flat)

    gather_params = GradientReducer.gather_params  # do nothing: each block is gathered when it runs
