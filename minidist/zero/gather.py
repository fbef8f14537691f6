"""Stage 3: gather the parameters of a block before it runs and free them after it, in forward and in backward.

One block computes while the next is in flight. The parameters outside of all blocks (embedding, final norm, head)
stay unsharded as long as the model runs. The backward of a block is over when the previous block's begins: then its
gradients are reduced and its parameters freed. A block that is recomputed in backward is gathered once for both.

The hooks are registered on the modules, outside of anything that replaces their `forward`: recomputation and
compilation run inside, where all parameters are unsharded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.zero.flat_param import ShardedFlatParam


@dataclass(frozen=True)
class Block:
    """A module, with the flat parameters that are gathered before it runs and freed after it (stage 3).

    index: the index of the layer in the model, or ROOT for the parameters outside of all layers.
    """

    module: nn.Module
    flat_params: Sequence[ShardedFlatParam]
    index: int

    def launch_gather(self) -> None:
        """Collective: start the all-gather of the block's flat parameters, except those that are unsharded already."""
        for flat_param in self.flat_params:
            flat_param.launch_gather()

    def unshard(self) -> None:
        """Collective: all-gather the block's parameters and wait until they are complete."""
        self.launch_gather()
        for flat_param in self.flat_params:
            flat_param.wait_gather()

    def reshard(self) -> None:
        """Free the full parameters of the block; this rank keeps its shards."""
        for flat_param in self.flat_params:
            flat_param.reshard()


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
        self.root = root
        self.blocks = {block.index: block for block in blocks}
        self.num_layers = num_layers
        self.keep_last_block = keep_last_block
        self.prefetch = prefetch
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
        """Hook: unshard the root and start to gather the first block of the layers that will run."""
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
        """Hook: unshard a block and start to gather the next one."""
        block.unshard()
        self._prefetch_block(block.index + 1)

    def _after_forward(self, block: Block, hidden: Tensor) -> None:
        """Hook: reshard a block, unless it stays unsharded; unshard it when its backward begins."""
        if not self._stays_unsharded(block.index == self.num_layers - 1):
            block.reshard()
        if hidden.requires_grad:
            layers = self._layers
            hidden.register_hook(lambda _: self._before_backward(block, layers))

    def _stays_unsharded(self, is_last: bool) -> bool:
        """Whether parameters stay unsharded until backward. is_last: whether the last layer or the head uses them."""
        return self.keep_last_block and is_last and torch.is_grad_enabled()

    def _after_model(self, model: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        """Hook: reshard the root, unless it stays unsharded; unshard it when the loss's backward begins."""
        if not self._stays_unsharded(self._runs_last_layer):
            self.root.reshard()
        if self._runs_last_layer and isinstance(output, tuple) and output[0].requires_grad:
            layers = self._layers
            output[0].register_hook(lambda _: self._before_model_backward(layers))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _before_model_backward(self, layers: range) -> None:
        """Hook: unshard the root and start to gather the last of `layers`."""
        self._layers = layers
        self.root.unshard()
        self._prefetch_block(layers.stop - 1)

    def _before_backward(self, block: Block, layers: range) -> None:
        """Hook: end the backward of the block that came before, unshard this one and prefetch the next in backward."""
        self._layers = layers
        self._end_block_backward()
        block.unshard()
        self._prefetch_block(block.index - 1)
        self._in_backward = block

    def _end_block_backward(self) -> None:
        """End the backward of the current block: reshard its parameters and report it."""
        block = self._in_backward
        self._in_backward = None
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
