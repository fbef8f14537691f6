"""Entering and leaving the tensor-parallel region.

A `torch.autograd.Function` has a forward and a backward of its own: backward gets the gradient of forward's result, and
returns one gradient for each argument of forward, None for those that are no tensors. Write the missing lines of two
such functions, for the two ends of a tensor-parallel region. Every rank computes the same loss.

x and the results: any shape. key names the group; `ctx` carries values from forward to backward.
Example: 2 ranks, x = 3 on both, and rank r uses x in (r + 1) x, so that the output is reduce_from_tp((r + 1) x) = 9.
    Its gradient, 1, arrives at both partial results. copy_to_tp gives x the gradient 1 + 2 = 3 on both ranks.

Checked: values and gradients on several ranks against one process in float64; that arguments do not change;
and the collectives of each operator: copy_to_tp sends nothing in forward, reduce_from_tp nothing in backward.

You may call:
    ops.all_reduce(tensor, key)   the sum over the ranks of the group `key`, a new tensor
    Tensor.contiguous()   the tensor itself, or a contiguous copy

Check it with: python -m exercises check conjugate_pair

Stub efaefb2d.
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
        raise NotImplementedError("return the gradient of x, and None for key")


class _ReduceFromTP(torch.autograd.Function):
    """`reduce_from_tp` with its own backward. key: the group's name (`group.key`), for `ops.all_reduce(x, key)`."""

    @staticmethod
    def forward(ctx, x, key):
        raise NotImplementedError("return the sum over the ranks, replicated on all of them")

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("return the gradient of this rank's x, and None for key")


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Collective: return the sum of the partial results `x` (any shape) over the group; backward is the identity."""
    return x if group.size == 1 else _ReduceFromTP.apply(x, group.key)


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Return the replicated `x` (any shape) as input of a tensor-parallel region; backward all-reduces its gradient."""
    return x if group.size == 1 else _CopyToTP.apply(x, group.key)
