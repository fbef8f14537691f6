"""ZeRO stage 3: gather parameters before use, free them after: the solution, as it stands in minidist.simple.zero.

A rank keeps a shard of every block and the full parameters of one or two. The storage is emptied but the tensor
objects are kept, so the views of the model and of autograd's graph see the data again after the all-gather for
backward. A parameter is gathered twice per micro-batch, before forward and before backward: communication grows by
half compared with stage 2, in exchange for sharding the parameters, the last replicated tensors. This is what
PyTorch's FSDP does.

Without prefetch every block waits for its parameters. With it, the next block's are in flight while this one
computes, at the price of one more block in memory. All ranks must run the forward and backward of the same blocks in
the same order, even a rank without samples, because every block is a collective. The update changes shards only;
nobody needs the full parameters until the next forward.

Usual wrong answers:
* frees no block in backward
* gathers the last block ahead when the backward of the first one begins, as index -1, and keeps it
* the package's own
* gathered parameters are one
* keeps each block from its forward to the end of its backward
* frees what was gathered ahead, and gathers it once more
* free_root frees only the root: a block that was gathered ahead and not used stays
* in backward, each block waits for its parameters
* gathers a block for forward only; in backward its memory is freed
* keeps a copy of the parameters of each block that it frees after forward
* every hook sees the last value of the loop variable, and gathers the last block
* gathers the next block ahead in training mode only, so an evaluation waits for every block
* gathers the next block ahead even without prefetch
* does not free the parameters at first: the first forward computes with those that this rank had
* gathers and frees the root in every micro-batch
* gathers the root without looking whether there is one
* frees blocks after their reduction, and the root only after the update
* forgets the parameters outside all blocks
* waits for the gather of the next block before the current one computes: nothing overlaps
* gathered parameters are zero
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
        super().__init__(parameters, masters, blocks, group)
        self.prefetch = prefetch
        self.free_root()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self.gather_block(index, index + 1))
            block.register_forward_hook(lambda *_, index=index: self.blocks[index].free())
            block.register_full_backward_pre_hook(lambda *_, index=index: self.gather_block(index, index - 1))

    def gather_block(self, index: int, following: int) -> None:
        """Collective: gather a block that is about to compute. following: the one after it, whose gather may start."""
        self.blocks[index].start_gather()
        self.blocks[index].wait()
        if self.prefetch and 0 <= following < len(self.blocks):
            self.blocks[following].start_gather()

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the gradients of a flat parameter; free its parameters: their backward is over."""
        super().reduce(flat)
        flat.free()

    def gather_root(self) -> None:
        """Collective: gather the embedding, final norm and head, for the whole step or evaluation."""
        if self.root is not None:
            self.root.start_gather()
            self.root.wait()

    def free_root(self) -> None:
        """Free the root's parameters, and those of a block that was gathered ahead and not used."""
        for flat_param in self.flat_params:
            flat_param.free()
