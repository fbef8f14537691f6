"""gradients_are_those_of_one_process: what enters is told of this rank's part alone"""

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
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key):
        return ops.all_reduce(x, key)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group of what the ranks' parts of an operator gave, whole on every rank."""
    return x if group.size == 1 else _Summed.apply(x, group.key)


def copied(x: Tensor, group: Group) -> Tensor:
    """`x` (any shape), whole on every rank, on its way to parts of an operator: its gradients are summed."""
    return x if group.size == 1 else _Copied.apply(x, group.key)
