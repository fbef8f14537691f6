"""Into the shared part, and out of it: the solution, as it stands in minidist.parallel.tensor.operators.

All ranks compute the same loss from the same batch. What enters is used by every rank for a part of its own, so each
knows a part of its gradient, and the sum is all of it. What leaves is a sum already, and the gradient of a sum goes
to each of its terms as it is. Each of the two is the other one's backward: conjugate.

An all-reduce that autograd takes for a sum over *losses* sums again in backward. Here that would count the one loss
that all ranks share once for each rank, and every gradient behind it would be `size` times too large.

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
