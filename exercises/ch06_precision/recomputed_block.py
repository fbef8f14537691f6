"""Activation recomputation of a block.

Autograd saves many tensors of a block for backward, and all of them can be computed once more from the block's input.
Write an operation with a backward of its own that saves this input only, and the function that makes a block use it.

Recompute.apply(run, arguments, hidden, anchor) returns run(hidden, *arguments), where hidden is a tensor of any shape
and arguments a tuple of other objects, which need no gradient. Recompute is a Function with forward and backward, as
section 6.6 of the notebook introduces them; it may have a setup_context, too. recompute_block(block): from then on
block(hidden, *arguments) is such an operation, in training and in eval mode, any number of times before the first
backward; where gradients are disabled, it only runs the block.
Example: block(x) is x.exp().sin() with x of shape (1024,) in fp32. Without recomputation autograd keeps x.exp().
    recompute_block(block); y = block(x)   has the same values, and no tensor but x and y exists after the call
    y.sum().backward()                     runs the block once more, and gives x.grad bit for bit as without it

Checked: outputs and gradients bit for bit, in float64 and bf16, with dropout by addresses; no tensor of the block
between forward and backward; that backward frees each recomputed tensor after the operation that saved it; peak memory:
of 8 blocks that make 3 large tensors each, at most 7 such tensors; several calls in flight, with backward in any order,
or twice; how often the block runs (once in forward, once per backward, also from a gradient of zeros, and once under
no_grad); gradients of the weights if `hidden` needs none, through hooks on them as well; on 1 to 4 ranks that a block's
collectives are repeated once, in the same order on all of them; and arguments in other memory layouts, some of their
values NaN.

You may call:
    ctx.save_for_backward(tensor), ctx.saved_tensors   keeps a tensor; in backward, the tuple of kept tensors
    ctx.name = value   keeps any other object for backward, under a name of your choice
    torch.enable_grad()   gradients are disabled inside both forward and backward of a Function
    Tensor.detach(), Tensor.requires_grad_()   the same values without their graph; the start of a new graph
    out.backward(grad)   backward from a tensor `out` whose gradient is `grad`, of the same shape
    torch.empty(0, requires_grad=True)   a tensor that requires a gradient and takes no memory

Check it with: python -m exercises check recomputed_block

Stub 506b1a99.
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
        raise NotImplementedError("run the block, and keep what backward needs")

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("run the block again, and go backward through this second run")


def recompute_block(block: nn.Module) -> None:
    """Let a block recompute its activations in backward, in place.

    Dropout needs nothing: its masks are functions of addresses among the block's arguments, not of a generator's state.
    """
    raise NotImplementedError("replace the block's forward")
