"""Activation recomputation: keep the input of a block only, and compute the block once more in backward.

Chen et al. 2016, arXiv 1604.06174: one tensor per block is saved instead of all of them, for one more forward.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Recompute(Function):
    """`Recompute.apply(run, arguments, hidden, anchor)` returns `run(hidden, *arguments)`, and saves only `hidden`.

    Backward runs it again, and a backward inside of this one gives the parameters their gradients. anchor: any tensor
    that requires a gradient, so that autograd calls backward also if `hidden` does not, as behind a frozen embedding.
    """

    @staticmethod
    def forward(ctx, run, arguments, hidden, anchor):
        ctx.run, ctx.arguments = run, arguments
        ctx.save_for_backward(hidden)
        return run(hidden, *arguments)

    @staticmethod
    def backward(ctx, grad):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(hidden, *ctx.arguments)
        out.backward(grad)
        return None, None, hidden.grad, None


def recompute_block(block: nn.Module) -> None:
    """Let a block recompute its activations in backward, in place.

    Dropout needs nothing: its masks are functions of addresses among the block's arguments, not of a generator's state.
    """
    run = block.forward

    def forward(hidden: Tensor, *arguments) -> Tensor:
        return Recompute.apply(run, arguments, hidden, torch.empty(0, requires_grad=True))

    block.forward = forward
