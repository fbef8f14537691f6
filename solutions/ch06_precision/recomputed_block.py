"""Activation recomputation of a block: the solution, as it stands in minidist.simple.recompute.

The tensors that autograd saves for a layer are many times as large as its input, and all of them can be recomputed
from the input. So only the input is kept, and the price is one more forward, a third more arithmetic per step. Each
call keeps its own input in its own ctx: with several micro-batches in flight, each must be recomputed from its own.

The second run must be identical to the first: same input, same dropout mask. Here a mask is a function of an address
among the block's arguments, so nothing has to be restored; torch's own checkpoint restores the states of its random
number generators. If a layer communicates, the recomputation communicates again, so all ranks must recompute in the
same order, and once per call. The backward inside of backward is what torch calls reentrant: it adds to the .grad of
every weight, whatever the outer backward was asked for, so torch.autograd.grad does not work through it. torch's
newer version replaces the saved tensors by hooks instead, and has no such limit.

Usual wrong answers:
* the package's own
* ones, whatever the input
* saves a contiguous copy of an input that has another memory layout
* keeps a copy of the input, so one more tensor of its size
* passes the tuple of arguments as one argument if there is none
* lets the second run need a gradient only if the first one did: a frozen block behind an input without gradients
  cannot go backward
* returns the incoming gradient instead of that of the input
* does not run the block again if the gradient is zero on this rank, although others wait in its collectives
* the second run builds no graph, because gradients are disabled in backward
* builds the graph in forward and keeps it, so nothing is recomputed and nothing saved
* goes backward from the sum of the output, whatever gradient comes in
* returns no gradient for the input, so blocks before this one learn nothing
* the second run continues the graph of the first, and goes backward through the blocks before it as well
* keeps the input in the block, so that every backward recomputes from that of the last call
* right values, but saves as much as without recomputation
* keeps the graph of the second run while it goes backward through it
* recomputes once for each of input and weights, and sends every message as often
* has no gradient for the weights if the input requires none
* torch's own checkpoint, wrapped so that no line of the answer calls it
* does not recompute behind a frozen embedding, where autograd keeps all tensors of the block
* runs the block without a graph if its input requires no gradient
* recomputes in training mode only
* torch's own checkpoint
* recomputes already in forward
* drops the input after the first backward
* runs twice under no_grad as well
* goes backward through the second run twice, once for the input and once for the weights
* zeros, with an empty graph
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
