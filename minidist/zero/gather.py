"""Stage 3: gather the parameters of a block before it runs and free them after it, in forward and in backward.

One block computes while the next is in flight. The parameters of no block (embedding, final norm, head) stay gathered
as long as the model runs. The backward of a block is over when that of the block before it begins: then its gradients
are reduced and its parameters freed. A block that is recomputed in backward is gathered once for both.

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
    """A module and its flat parameters. index: its place in the model."""

    module: nn.Module
    flat_params: Sequence[ShardedFlatParam]
    index: int

    def launch(self) -> None:
        for flat_param in self.flat_params:
            flat_param.launch_gather()

    def need(self) -> None:
        self.launch()
        for flat_param in self.flat_params:
            flat_param.wait_gather()

    def release(self) -> None:
        for flat_param in self.flat_params:
            flat_param.release()


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
