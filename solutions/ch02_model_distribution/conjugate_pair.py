"""Entering and leaving the tensor-parallel region: the solution, as it stands in minidist.parallel.tensor.operators.

All ranks compute the same loss from the same batch. Every rank uses the region's input for its own shard of the
layer, so each rank computes a local gradient of the input, and the full gradient is the sum of the local gradients.
The region's output is a sum of partial outputs, and the gradient of a sum is passed to each of its terms unchanged.
Each operator is the backward of the other: they are conjugate.

An all-reduce that autograd differentiates as a sum over *losses* all-reduces again in backward. Here that would count
the one loss that all ranks have in common once per rank, and every gradient upstream of it would be `size` times too
large.

Usual wrong answers:
* the package's own
* one number whatever comes
* what enters is told of this rank's part alone
* everybody sends its part to everybody, who adds them up
* the gradient that came in is overwritten, and it is somebody else's
* the mean of the parts in the place of their sum
* the last rank divides its gradient by two
* the sum is written over this rank's part
* the sum is in float32, whatever came in
* a sum on the way in as well, which nobody looks at
* what every rank has whole is summed as it enters
* the sum is summed again in backward, as for a sum of losses: too large by the number of ranks
* zeros
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key):
        ctx.key = key
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ops.all_reduce(grad.contiguous(), ctx.key), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key):
        return ops.all_reduce(x, key)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """All-reduce the partial results `x` (any shape) of a tensor-parallel region; the result is replicated."""
    return x if group.size == 1 else _Summed.apply(x, group.key)


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Return the replicated `x` (any shape) as input of a tensor-parallel region; backward all-reduces its gradient."""
    return x if group.size == 1 else _Copied.apply(x, group.key)
