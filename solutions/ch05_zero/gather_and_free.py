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
* all blocks are gathered when the model begins
* every block stays until its backward
* the last block stays, whether it is to or not
* blocks pile up in backward, up to the whole model
* the package's own under the learner's names
* a gathered row is full of ones
* the rest is freed after the embedding, and gathered for the head once more
* after its forward a block stays until its backward is over
* memory is given back while the network still writes to it
* a flat parameter whose all-gather is in flight is gathered again
* a block is gathered for forward, and its memory is gone in backward
* a copy of the row stays when its memory is given back
* the last block stays where no backward will come
* the last of three ranks sends its part in reverse
* in backward the block after is gathered ahead, which is through already
* every row stays where it is: stage 1 with more messages
* the last block goes and comes back at once
* `on_block_done` is never called
* this rank's part is a piece of the row, and is lost with it
* what is ahead is gathered, though this pass does not go there
* the next block is gathered ahead, whether it is to or not
* in backward every block waits for the network
* every block waits for the network
* embedding and head are gathered by a pass that has neither
* nothing is sent; a rank fills its row from a copy it has kept
* `on_block_done` is called while the block still has memory
* `on_block_done` is called when a block's backward begins
* the block ahead is waited for before this one computes
* a gathered row is zero
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist.zero.flat_param import FlatParam
from minidist.zero.gather import Block


class BlockGatherer:
    """Gathers and frees the blocks of a model while it runs.

    model: called with `layers`, as `Transformer` is. root: the parameters outside of all blocks. num_layers: of the
    whole model. keep: whether the last block and the head stay gathered between forward and backward. prefetch: whether
    to gather the next block while one computes. on_block_done: called with the flat parameters of each block whose
    backward is over.
    """

    def __init__(
        self, model: nn.Module, root: Block, blocks: Sequence[Block], num_layers: int, keep: bool, prefetch: bool
    ):
        self.root, self.blocks = root, {block.index: block for block in blocks}
        self.end_of_model, self.keep, self.prefetch = num_layers, keep, prefetch
        self.on_block_done: Callable[[Sequence[ShardedFlatParam]], None] | None = None
        self._layers = range(num_layers)  # of the running forward
        self._in_backward: Block | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._after_model)
        for block in blocks:
            block.module.register_forward_pre_hook(lambda *_, block=block: self._before(block))
            block.module.register_forward_hook(lambda *args, block=block: self._after(block, args[-1]))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: tuple, how: dict) -> None:
        layers = how.get("layers")
        self._layers = range(self.end_of_model) if layers is None else layers
        if self._layers.start == 0 or self._at_end:
            self.root.need()
        self._launch(self._layers.start)

    @property
    def _at_end(self) -> bool:
        return self._layers.stop == self.end_of_model

    def _launch(self, index: int) -> None:
        """Start to gather a block ahead of its use, if the running forward or backward includes it."""
        if self.prefetch and index in self._layers:
            self.blocks[index].launch()

    def _before(self, block: Block) -> None:
        block.need()
        self._launch(block.index + 1)

    def _after(self, block: Block, hidden: Tensor) -> None:
        if not self._stays(block.index == self.end_of_model - 1):
            block.release()
        if hidden.requires_grad:
            layers = self._layers
            hidden.register_hook(lambda _: self._before_backward(block, layers))

    def _stays(self, last: bool) -> bool:
        return self.keep and last and torch.is_grad_enabled()

    def _after_model(self, model: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        if not self._stays(self._at_end):
            self.root.release()
        if self._at_end and isinstance(output, tuple) and output[0].requires_grad:
            layers = self._layers
            output[0].register_hook(lambda _: self._begin_backward(layers))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _begin_backward(self, layers: range) -> None:
        self._layers = layers
        self.root.need()
        self._launch(layers.stop - 1)

    def _before_backward(self, block: Block, layers: range) -> None:
        self._layers = layers
        self._leave()
        block.need()
        self._launch(block.index - 1)
        self._in_backward = block

    def _leave(self) -> None:
        """End the backward of the current block: report and free it."""
        block, self._in_backward = self._in_backward, None
        if block is not None:
            block.release()
            if self.on_block_done is not None:
                self.on_block_done(block.flat_params)

    def end(self) -> None:
        """End a micro-batch's backward: free all blocks."""
        self._in_backward = None
        self.root.release()
        for block in self.blocks.values():
            block.release()

    def gather_all(self) -> None:
        """Gather all parameters, to read the full model; `end` frees them."""
        for block in [self.root, *self.blocks.values()]:
            block.need()


class ShardedFlatParam(FlatParam):
    """A flat parameter whose full buffer is allocated only while it is unsharded (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_unsharded = True
        self.release()

    def _own(self, begin: int, end: int) -> Tensor:
        return super()._own(begin, end).clone()  # outlives the full buffer

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Allocate the flat buffer and start its all-gather, unless it is gathered or in flight already."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.row.untyped_storage().resize_(self.row.numel() * self.row.element_size())
            super().launch_gather()

    def release(self) -> None:
        """Free the flat buffer's storage; the model's and autograd's views see the data of the next all-gather."""
        if self.is_unsharded:
            self.wait_gather()
            self.is_unsharded = False
            self.row.untyped_storage().resize_(0)
