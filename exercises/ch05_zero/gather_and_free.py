"""Stage 3: gather and free blocks.

Write the missing lines of BlockGatherer and ShardedFlatParam; their docstrings specify the results.
You may call: Block.launch, Block.need, Block.release, FlatParam.launch_gather, FlatParam.wait_gather,
UntypedStorage.resize_, Tensor.clone, Tensor.register_hook, torch.is_grad_enabled.
Check it with: python -m exercises check gather_and_free

Stub ac1122b3.
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
        raise NotImplementedError("start the all-gather of the first block of a pass over these layers")

    @property
    def _runs_last_layer(self) -> bool:
        """Whether the running forward or backward includes the last layer of the model."""
        return self._layers.stop == self.num_layers

    def _prefetch_block(self, index: int) -> None:
        """Start to gather a block ahead of its use, if the running forward or backward includes it."""
        raise NotImplementedError("start to prefetch this block, if that is useful")

    def _before_forward(self, block: Block) -> None:
        block.unshard()
        raise NotImplementedError("prefetch the next block while this one computes")

    def _after_forward(self, block: Block, hidden: Tensor) -> None:
        raise NotImplementedError("free the block, unless it stays; register _before_backward as a hook for backward")

    def _stays_unsharded(self, is_last: bool) -> bool:
        raise NotImplementedError("say whether the last blocks of forward stay unsharded until backward")

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
        raise NotImplementedError("finish the block that was in backward, mark this one, prefetch the next")

    def _end_block_backward(self) -> None:
        """End the backward of the current block: reshard its parameters and report it."""
        raise NotImplementedError("free the block whose backward has run, if any, and call `on_block_done`")

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
        raise NotImplementedError("return this rank's shard, which must stay valid when the flat parameter is freed")

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Collective: allocate `full_buffer` and start its all-gather, unless done since the last `reshard`."""
        raise NotImplementedError("allocate the flat parameter and start its all-gather, unless it is unsharded")

    def reshard(self) -> None:
        """Free the storage of `full_buffer`; views in the model and in autograd see the next all-gather's data."""
        raise NotImplementedError("free the storage of the flat parameter")
