"""Stage 3: gather and free blocks.

Write the missing lines of BlockGatherer and ShardedFlatParam; its docstring specifies the result.
You may call: Block.launch, Block.need, Block.release, FlatParam.launch_gather, FlatParam.wait_gather,
UntypedStorage.resize_, Tensor.clone, Tensor.register_hook, torch.is_grad_enabled.
Check it with: python -m exercises check gather_and_free

Stub 876fa7b5.
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
        raise NotImplementedError("start the all-gather of the first block of a pass over these layers")

    @property
    def _at_end(self) -> bool:
        return self._layers.stop == self.end_of_model

    def _launch(self, index: int) -> None:
        """Start to gather a block ahead of its use, if the running forward or backward includes it."""
        raise NotImplementedError("start to prefetch this block, if that is useful")

    def _before(self, block: Block) -> None:
        block.need()
        raise NotImplementedError("prefetch the next block while this one computes")

    def _after(self, block: Block, hidden: Tensor) -> None:
        raise NotImplementedError("free the block, unless it stays; register _before_backward as a hook for backward")

    def _stays(self, last: bool) -> bool:
        raise NotImplementedError("say whether the last blocks of forward stay unsharded until backward")

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
        raise NotImplementedError("finish the block that was in backward, mark this one, prefetch the next")

    def _leave(self) -> None:
        """End the backward of the current block: report and free it."""
        raise NotImplementedError("free the block whose backward has run, if any, and call `on_block_done`")

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
        raise NotImplementedError("return this rank's shard, which must stay valid when the flat parameter is freed")

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Allocate the flat buffer and start its all-gather, unless it is gathered or in flight already."""
        raise NotImplementedError("allocate the flat parameter and start its all-gather, unless it is unsharded")

    def release(self) -> None:
        """Free the flat buffer's storage; the model's and autograd's views see the data of the next all-gather."""
        raise NotImplementedError("free the storage of the flat parameter")
