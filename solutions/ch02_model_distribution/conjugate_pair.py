"""Entering and leaving the tensor-parallel region: the solution, as it stands in minidist.parallel.tensor.operators.

All ranks compute the same loss from the same batch. Every rank uses the region's input for its own shard of the
layer, so each rank computes a local gradient of the input, and the full gradient is the sum of the local gradients.
The region's output is a sum of partial outputs, and the gradient of a sum is passed to each of its terms unchanged.
Each operator is the backward of the other: they are conjugate.

An all-reduce that autograd differentiates as a sum over *losses* all-reduces again in backward. Here that would count
the one loss that all ranks have in common once per rank, and every gradient upstream of it would be `size` times too
large.

Usual wrong answers:
* calls the package's functions
* returns a constant
* the input keeps its partial gradient
* all-reduces the gradient in float32, which loses digits of float64
* all-gathers the partial results and sums them locally
* overwrites the incoming gradient
* averages instead of summing
* the last rank halves its gradient
* overwrites this rank's input with the sum
* sums in float32, whatever the dtype of the input
* also all-reduces in the forward of copy_to_tp, for no purpose
* sums the replicated input in the forward of copy_to_tp
* all-reduces in backward as well: gradients are too large by the number of ranks
* returns zeros
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops


class _CopyToTP(torch.autograd.Function):
    """`copy_to_tp` with its own backward. key: the group's name (`group.key`), for `ops.all_reduce(x, key)`."""

    @staticmethod
    def forward(ctx, x, key):
        ctx.key = key
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ops.all_reduce(grad.contiguous(), ctx.key), None


class _ReduceFromTP(torch.autograd.Function):
    """`reduce_from_tp` with its own backward. key: the group's name (`group.key`), for `ops.all_reduce(x, key)`."""

    @staticmethod
    def forward(ctx, x, key):
        return ops.all_reduce(x, key)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Collective: return the sum of the partial results `x` (any shape) over the group; backward is the identity."""
    return x if group.size == 1 else _ReduceFromTP.apply(x, group.key)


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Return the replicated `x` (any shape) as input of a tensor-parallel region; backward all-reduces its gradient."""
    return x if group.size == 1 else _CopyToTP.apply(x, group.key)
