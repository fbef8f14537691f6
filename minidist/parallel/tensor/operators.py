"""What happens to activations on their way into and out of the part of a model that ranks share.

Each pair is conjugate: the backward of one is the forward of the other. All ranks of the group compute the same loss
from the same batch, so a tensor that every rank holds whole has, on every rank, its whole gradient.

    ===============  ===========================  ============================
    operator         forward                      backward
    ===============  ===========================  ============================
    `copied`         nothing                      all-reduce
    `summed`         all-reduce                   nothing
    `gathered`       all-gather along a dim       reduce-scatter along it
    `scattered`      reduce-scatter along a dim   all-gather along it
    ===============  ===========================  ============================

`copied` and `summed` are f and g of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3 and section 3), `gathered` and
`scattered` g and g-bar of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2, figure 5), where the ranks share
the sequence outside of the operators.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops

Operator = Callable[[Tensor], Tensor]
SEQUENCE = 1  # the dimension of the sequence in (b, s, h)


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


def copied(x: Tensor, group: Group) -> Tensor:
    """`x` (any shape), whole on every rank, on its way to parts of an operator: its gradients are summed."""
    return x if group.size == 1 else _Copied.apply(x, group.key)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group of what the ranks' parts of an operator gave, whole on every rank."""
    return x if group.size == 1 else _Summed.apply(x, group.key)


def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' equal parts of a tensor, put together along `dim` in rank order."""
    if group.size == 1:
        return x
    # Laid out anew once: else each projection that reads it would make, and keep for backward, a copy of its own.
    return ops.all_gather(x.movedim(dim, 0), group.key, group.size).movedim(0, dim).contiguous()


def scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal part along `dim` of the sum over the group. Raises ValueError when the size does not divide."""
    if group.size == 1:
        return x
    if x.shape[dim] % group.size:
        raise ValueError(f"dimension {dim} has {x.shape[dim]} elements, which {group.size} ranks cannot share equally")
    return ops.reduce_scatter(x.movedim(dim, 0), group.key, group.size).movedim(0, dim)


def operators(group: Group, sequence: bool) -> tuple[Operator, Operator]:
    """How (b, s, h) enters the part of the model that ranks share, and how it leaves: whole, or as parts."""
    if sequence:
        return partial(gathered, group=group, dim=SEQUENCE), partial(scattered, group=group, dim=SEQUENCE)
    return partial(copied, group=group), partial(summed, group=group)
