"""Entering and leaving the tensor-parallel region: the solution, as it stands in minidist.simple.tensor_parallel.

All ranks compute the same loss from the same batch. Every rank uses the input of a layer for its own shard, so each
rank has a partial gradient of the input, and the gradient is the sum over the ranks. The output of a layer is a sum
of partial results, and the gradient of a sum is passed to each of its terms unchanged. So entering and leaving are
each other's backward: they are conjugate.

An all-reduce is a reduce-scatter followed by an all-gather. If the ranks keep their own tokens between the layers,
the reduce-scatter is enough to leave, and the all-gather happens at the next entrance: the same bytes. These two are
each other's backward as well, so `enter` and `leave` need not be written again.

An all-reduce that autograd differentiates as a sum over *losses* all-reduces again in backward. Here that would count
the one loss that all ranks have in common once per rank, and every gradient before it would be n times too large.

Usual wrong answers:
* ignores `op`, and always sums
* applies forward to the gradient, too
* reshapes the gathered tensor where dimensions must be moved: right for a batch of one
* gathers along the batch: the first dimension of x, not that of the tokens
* calls the package's functions
* returns a constant
* all-gathers the partial results and sums them locally: n - 1 tensors sent instead of about two
* gathers by a sum of tensors that are zero outside of each rank's tokens: twice the bytes of an all-gather
* all-reduces in float32 and converts back, which loses digits of float64
* the input of a layer keeps its partial gradient: right outputs, wrong gradients
* all-reduces in the memory of its argument where that is contiguous
* averages over the ranks instead of summing
* sums without autograd, so that no gradient reaches the partial results
* takes every reduction but the sum for the maximum
* hands the collective a tensor that is not contiguous
* the last rank halves its gradient
* deals out the tokens: rank r gets every n-th one
* overwrites this rank's input with the sum
* cuts the tokens by the rank among all processes
* sums in float32, whatever the dtype of x
* also sums when a replicated tensor enters, for no purpose
* is a Region under another name: every rank keeps all tokens
* all-reduces all tokens and keeps its own: twice the bytes of a reduce-scatter
* sums the replicated input when it enters
* all-reduces in the backward of `leave` as well: gradients are too large by the number of ranks
* one all-gather per token: the same bytes, in many small collectives
* returns zeros
"""

import torch
from torch import Tensor
from torch.autograd import Function

from minidist.comm import Group, all_gather, all_reduce, reduce_scatter


def sum_over_ranks(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Collective: return the sum (or the reduction `op`) of the ranks' `x`; `x` itself is not changed."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(total, group, op)
    return total


class RegionOperator(Function):
    """`RegionOperator.apply(x, forward, backward)` returns `forward(x)`, and applies `backward` to the gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.apply_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.apply_backward(grad), None, None


class Region:
    """Where activations enter and leave the tensor-parallel layers; outside of it each rank has all tokens, (b, s, h).

    `gather` and `reduce` are each other's backward. Ranks that compute different things from one input have partial
    gradients of it, to be summed; a sum passes its gradient to every summand.
    """

    def __init__(self, group: Group):
        self.group = group

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens, which every rank has here: the identity."""
        return x.view_as(x)

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results `x`, (b, s, h)."""
        return sum_over_ranks(x, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a layer, `gather(x)`; backward returns `reduce` of its gradient. Collective."""
        return RegionOperator.apply(x, self.gather, self.reduce)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' results, `reduce(x)`; backward returns `gather` of its gradient. Collective."""
        return RegionOperator.apply(x, self.reduce, self.gather)


class SequenceParallelRegion(Region):
    """A region outside of which each rank has its own tokens, (b, s / n, h): the sum is reduce-scattered over them."""

    def gather(self, x: Tensor) -> Tensor:
        """Collective: give every rank all tokens, (b, s / n, h) -> (b, s, h)."""
        own = x.movedim(1, 0).contiguous()
        full = own.new_empty(self.group.size * len(own), *own.shape[1:])
        all_gather(full, own, self.group)
        # Contiguous once here: each projection that reads it would otherwise copy it, and keep the copy for backward.
        return full.movedim(0, 1).contiguous()

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results of this rank's tokens, (b, s, h) -> (b, s / n, h)."""
        full = x.movedim(1, 0).contiguous()
        own = full.new_empty(len(full) // self.group.size, *full.shape[1:])
        reduce_scatter(own, full, self.group)
        return own.movedim(0, 1)
