"""Autograd operators at the entry and exit of tensor-parallel regions.

The operators of each pair are conjugate: the backward of one is the forward of the other. All ranks of the group
compute the same loss from the same batch, so a replicated tensor has its full gradient on every rank.

    ======================  ===========================  ===========================
    operator                forward                      backward
    ======================  ===========================  ===========================
    `copy_to_tp`            identity                     all-reduce
    `reduce_from_tp`        all-reduce                   identity
    `gather_from_sp`        all-gather along a dim       reduce-scatter along it
    `reduce_scatter_to_sp`  reduce-scatter along a dim   all-gather along it
    ======================  ===========================  ===========================

`copy_to_tp` and `reduce_from_tp` are f and g of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3 and section 3);
`gather_from_sp` and `reduce_scatter_to_sp` are g and g-bar of Korthikanti et al. 2022 (arXiv 2205.05198, section
4.2.2, figure 5), where the activations outside the region are sharded along the sequence.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops

Operator = Callable[[Tensor], Tensor]
SEQUENCE = 1  # the dimension of the sequence in (b, s, h)


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


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Return the replicated `x` (any shape) as input of a tensor-parallel region; backward all-reduces its gradient."""
    return x if group.size == 1 else _CopyToTP.apply(x, group.key)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Collective: return the sum of the partial results `x` (any shape) over the group; backward is the identity."""
    return x if group.size == 1 else _ReduceFromTP.apply(x, group.key)


def gather_from_sp(x: Tensor, group: Group, dim: int) -> Tensor:
    """Collective: all-gather equal shards along `dim`, in rank order; backward reduce-scatters the gradient."""
    if group.size == 1:
        return x
    # Contiguous once here: otherwise each projection that reads it would copy it and save that copy for backward.
    return ops.all_gather(x.movedim(dim, 0), group.key, group.size).movedim(0, dim).contiguous()


def reduce_scatter_to_sp(x: Tensor, group: Group, dim: int) -> Tensor:
    """Collective: sum `x` over the group and return this rank's shard along `dim`; backward all-gathers the gradient.

    Raises ValueError when the group size does not divide the dimension.
    """
    if group.size == 1:
        return x
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dimension {dim} has {x.shape[dim]} elements, which cannot be sharded equally over {group.size} ranks"
        )
    return ops.reduce_scatter(x.movedim(dim, 0), group.key, group.size).movedim(0, dim)


def region_operators(group: Group, sequence_parallel: bool) -> tuple[Operator, Operator]:
    """Return the operators (enter, leave) for activations (b, s, h) at the two ends of a tensor-parallel region.

    sequence_parallel: whether activations outside the region are sharded along the sequence.
    """
    if sequence_parallel:
        dim = {"group": group, "dim": SEQUENCE}
        return partial(gather_from_sp, **dim), partial(reduce_scatter_to_sp, **dim)
    return partial(copy_to_tp, group=group), partial(reduce_from_tp, group=group)
