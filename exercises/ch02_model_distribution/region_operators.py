"""Entering and leaving the tensor-parallel region.

Every tensor-parallel layer begins with `enter` and ends with `leave`. Write the two operators with their gradients, for
ranks that have all tokens outside of the layers (Region) and for ranks that have their own (SequenceParallelRegion).

sum_over_ranks: a new tensor, the reduction `op` ("sum", "max", "min") of the ranks' x; without a gradient function.
RegionOperator: an autograd function, whose arguments `forward` and `backward` are functions of one tensor. Its own
backward gets the gradient of the result, and returns one gradient per argument of apply: None for the two functions.
Region: x and all results are (b, s, h). SequenceParallelRegion: outside of the layers a rank has s / n consecutive
tokens, in rank order. gather: (b, s / n, h) -> (b, s, h), the tokens of all ranks. reduce: (b, s, h) -> (b, s / n, h),
this rank's tokens of the sum of x over the ranks. It inherits `enter` and `leave`, so write these with `gather` and
`reduce`. All ranks compute the same loss. Tensors are fp32 or fp64, in any memory layout, and do not change.
Example: 2 ranks, b = h = 1. In a Region, x = 3 on both, and rank r computes (r + 1) x between `enter` and `leave`: the
    result is 3 + 6 = 9. Its gradient, 1, is the gradient of both terms, and x gets 1 + 2 = 3 on both ranks.
    In a SequenceParallelRegion rank 0 enters with [[[1]]] and rank 1 with [[[2]]]: both get [[[1], [2]]]. Rank 0 leaves
    with [[[1], [2]]] and rank 1 with [[[10], [20]]]: rank 0 gets [[[11]]], rank 1 gets [[[22]]].

Checked: values and gradients of both regions on 1 to 4 ranks against one process in float64, also in groups of some of
the ranks; sum_over_ranks with each `op`; RegionOperator with other functions; that arguments and arriving gradients do
not change, in any layout; the collectives of each operator: at most one in forward and one in backward, of the bytes of
an all-reduce, all-gather or reduce-scatter, and none where none is needed; and other batches, layouts and numbers of
tokens on 1 to 7 ranks.

You may call:
    all_reduce(tensor, group, op)   overwrites a contiguous tensor with the reduction over the ranks, such as "sum"
    all_gather(full, own, group)   full (n m, ...): the ranks' own (m, ...) one after the other; both contiguous
    reduce_scatter(own, full, group)   own (m, ...): this rank's n-th of the sum of full (n m, ...); both contiguous
    RegionOperator.apply(x, forward, backward)   how an autograd function is called; group.size, group.rank
    Tensor.movedim(source, destination)   a view with one dimension in another place
    Tensor.detach(), Tensor.contiguous(), Tensor.new_empty(*shape), Tensor.clone(memory_format=torch.contiguous_format)

Check it with: python -m exercises check region_operators

Stub c73f623e.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from minidist.comm import Group, all_gather, all_reduce, reduce_scatter


def sum_over_ranks(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Collective: return the sum (or the reduction `op`) of the ranks' `x`; `x` itself is not changed."""
    raise NotImplementedError("return the reduction of the ranks' x, a new tensor")


class RegionOperator(Function):
    """`RegionOperator.apply(x, forward, backward)` returns `forward(x)`, and applies `backward` to the gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        raise NotImplementedError("return forward(x), and keep what backward needs")

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("return the gradients of x, forward and backward")


class Region:
    """Where activations enter and leave the tensor-parallel layers; outside of it each rank has all tokens, (b, s, h).

    `gather` and `reduce` are each other's backward. Ranks that compute different things from one input have partial
    gradients of it, to be summed; a sum passes its gradient to every summand.
    """

    def __init__(self, group: Group):
        self.group = group

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens, which every rank has here: the identity."""
        raise NotImplementedError("return all tokens, (b, s, h)")

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results `x`, (b, s, h)."""
        raise NotImplementedError("return the sum of the ranks' x, (b, s, h)")

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a layer, `gather(x)`; backward returns `reduce` of its gradient. Collective."""
        raise NotImplementedError("return the input of the layer; its gradient is reduced")

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' results, `reduce(x)`; backward returns `gather` of its gradient. Collective."""
        raise NotImplementedError("return the output of the layer; its gradient is gathered")


class SequenceParallelRegion(Region):
    """A region outside of which each rank has its own tokens, (b, s / n, h): the sum is reduce-scattered over them."""

    def gather(self, x: Tensor) -> Tensor:
        """Collective: give every rank all tokens, (b, s / n, h) -> (b, s, h)."""
        raise NotImplementedError("return the tokens of all ranks, (b, s, h)")

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results of this rank's tokens, (b, s, h) -> (b, s / n, h)."""
        raise NotImplementedError("return this rank's tokens of the sum over the ranks, (b, s / n, h)")
