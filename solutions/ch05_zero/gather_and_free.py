"""Stage 3: gather and free blocks: the solution, as it stands in minidist.zero.gather and minidist.zero.flat_param.

A rank keeps a shard of every block, and the full parameters of two blocks: the one that computes and the next one,
whose all-gather is in flight. The memory of all other blocks is freed: the storage is emptied but the tensor objects
are kept, so the views of the model and of autograd's graph see the data again after the all-gather for backward. A
parameter is gathered twice per micro-batch, before forward and before backward: communication grows by half compared
with stages 1 and 2, in exchange for sharding the parameters, the last replicated tensors.

The last block in forward is the first in backward, so the last block and the head stay unsharded in between. A
block's backward has ended when its neighbour's begins; the first block's ends with the whole backward. Prefetch is
limited to the layers of the current pass: in a pipeline the next block may be on another stage. Without prefetch the
results are the same, and every block waits for its all-gather.

Usual wrong answers:
* gathers all blocks when the model begins
* keeps every block until its backward
* keeps the last block even if `keep` is false
* frees no block in backward
* the package's own under the learner's names
* a gathered flat parameter is full of ones
* frees the rest group after the embedding and gathers it again for the head
* keeps each block from its forward to the end of its backward
* frees memory while the network still writes to it
* a flat parameter whose all-gather is in flight is gathered again
* gathers a block for forward only; in backward its memory is freed
* keeps a copy of the flat parameter when it frees the memory
* keeps the last block although no backward follows
* the last of three ranks sends its shard in reverse order
* prefetches the next block also in backward, where it has already run
* frees nothing: the memory of stage 1 with more messages
* frees the last block after forward, and gathers it again at once
* never calls `on_block_done`
* this rank's shard is a view of the flat parameter, and is freed with it
* prefetches a block that this forward does not run
* prefetches even if `prefetch` is false
* in backward, every block waits for its all-gather
* every block waits for its all-gather
* gathers embedding and head in a forward that has neither
* sends nothing: a rank fills the flat parameter from a copy that it kept
* calls `on_block_done` while the block still has memory
* calls `on_block_done` when a block's backward begins
* waits for the prefetched block before this one computes
* a gathered flat parameter is zero
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist.zero.flat_param import FlatParam
from minidist.zero.gather import Block


class BlockGatherer:
    """Gathers the parameters of each block before it runs and frees them after it (stage 3), by hooks on the modules.

    model: the model, with the interface of `Transformer`. root: the parameters outside of all `blocks`. num_layers: the
    number of layers of the whole model. keep_last_block: whether the last block and the head stay unsharded between
    forward and backward. prefetch: whether to gather the next block while one computes. on_block_done: called with the
    flat parameters of each block whose backward is over; None to call nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        root: Block,
        blocks: Sequence[Block],
        num_layers: int,
        keep_last_block: bool,
        prefetch: bool,
    ):
        self.root, self.blocks = root, {block.index: block for block in blocks}
        self.num_layers, self.keep_last_block, self.prefetch = num_layers, keep_last_block, prefetch
        self.on_block_done: Callable[[Sequence[ShardedFlatParam]], None] | None = None
        self._layers = range(num_layers)  # of the running forward
        self._in_backward: Block | None = None
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model)
        for block in blocks:
            block.module.register_forward_pre_hook(lambda *_, block=block: self._before_forward(block))
            block.module.register_forward_hook(lambda *args, block=block: self._after_forward(block, args[-1]))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        layers = kwargs.get("layers")
        self._layers = range(self.num_layers) if layers is None else layers
        if self._layers.start == 0 or self._runs_last_layer:
            self.root.unshard()
        self._prefetch_block(self._layers.start)

    @property
    def _runs_last_layer(self) -> bool:
        """Whether the running forward or backward includes the last layer of the model."""
        return self._layers.stop == self.num_layers

    def _prefetch_block(self, index: int) -> None:
        """Start to gather a block ahead of its use, if the running forward or backward includes it."""
        if self.prefetch and index in self._layers:
            self.blocks[index].launch_gather()

    def _before_forward(self, block: Block) -> None:
        block.unshard()
        self._prefetch_block(block.index + 1)

    def _after_forward(self, block: Block, hidden: Tensor) -> None:
        if not self._stays_unsharded(block.index == self.num_layers - 1):
            block.reshard()
        if hidden.requires_grad:
            layers = self._layers
            hidden.register_hook(lambda _: self._before_backward(block, layers))

    def _stays_unsharded(self, is_last: bool) -> bool:
        return self.keep_last_block and is_last and torch.is_grad_enabled()

    def _after_model(self, model: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        if not self._stays_unsharded(self._runs_last_layer):
            self.root.reshard()
        if self._runs_last_layer and isinstance(output, tuple) and output[0].requires_grad:
            layers = self._layers
            output[0].register_hook(lambda _: self._before_model_backward(layers))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _before_model_backward(self, layers: range) -> None:
        self._layers = layers
        self.root.unshard()
        self._prefetch_block(layers.stop - 1)

    def _before_backward(self, block: Block, layers: range) -> None:
        self._layers = layers
        self._end_block_backward()
        block.unshard()
        self._prefetch_block(block.index - 1)
        self._in_backward = block

    def _end_block_backward(self) -> None:
        """End the backward of the current block: reshard its parameters and report it."""
        block, self._in_backward = self._in_backward, None
        if block is not None:
            block.reshard()
            if self.on_block_done is not None:
                self.on_block_done(block.flat_params)

    def reshard_all(self) -> None:
        """Reshard all blocks: free the full parameters. Called after the backward of a micro-batch."""
        self._in_backward = None
        self.root.reshard()
        for block in self.blocks.values():
            block.reshard()

    def gather_all(self) -> None:
        """Collective: unshard all parameters, so that the full model can be read; `reshard_all` reshards them."""
        for block in [self.root, *self.blocks.values()]:
            block.unshard()


class ShardedFlatParam(FlatParam):
    """A `FlatParam`, with its arguments, whose full buffer is allocated only while it is unsharded (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_unsharded = True
        self.reshard()

    def _take_shard(self, begin: int, end: int) -> Tensor:
        return super()._take_shard(begin, end).clone()  # outlives the full buffer

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Collective: allocate `full_buffer` and start its all-gather, unless done since the last `reshard`."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.full_buffer.untyped_storage().resize_(self.full_buffer.numel() * self.full_buffer.element_size())
            super().launch_gather()

    def reshard(self) -> None:
        """Free the storage of `full_buffer`; views in the model and in autograd see the next all-gather's data."""
        if self.is_unsharded:
            self.wait_gather()
            self.is_unsharded = False
            self.full_buffer.untyped_storage().resize_(0)
