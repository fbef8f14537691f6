"""Functional collectives for model code: `torch.library` ops with fake kernels and autograd formulas.

A block that calls them compiles with `fullgraph=True`, and the meter still counts their bytes, because the real kernels
call `collectives`. An op's arguments are tensors and plain values, so `group` is a `Group.key`, a string.

Gradients are those of the sum of all ranks' losses, so the backward of an all-gather is a reduce-scatter.
"""

import torch
from torch import Tensor

from minidist.comm import collectives
from minidist.comm.group import find_group


@torch.library.custom_op("minidist::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Collective: return the sum of `x` (any shape) over the group with this `Group.key`, as a new tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(result, find_group(group))
    return result


@torch.library.custom_op("minidist::largest", mutates_args=())
def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """Collective: return the elementwise maximum of `x` over the group with this `Group.key`, without a gradient."""
    result = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(result, find_group(group), "max")
    return result


@torch.library.custom_op("minidist::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Collective: return the `x` (n, ...) of all ranks, concatenated in rank order: (size * n, ...), a new tensor.

    group: the group's `Group.key`. size: its number of ranks, which a compiler cannot read from the key.
    """
    result = x.new_empty((size * x.shape[0], *x.shape[1:]))
    collectives.all_gather(result, x.contiguous(), find_group(group))
    return result


@torch.library.custom_op("minidist::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """Collective: return this rank's shard (n, ...) of the sum of `x` (size * n, ...) over the group, a new tensor.

    group: the group's `Group.key`. size: its number of ranks.
    """
    result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    collectives.reduce_scatter(result, x.contiguous(), find_group(group))
    return result


@torch.library.custom_op("minidist::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Collective: send part i of `x` to rank i; return the parts received from all ranks, concatenated in rank order.

    group: the group's `Group.key`. The parts are consecutive and of equal length along dimension 0.
    """
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    collectives.all_to_all(result, x.contiguous(), find_group(group))
    return result


@all_to_all.register_fake
@all_reduce_max.register_fake
@all_reduce.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(x, group, size):
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@reduce_scatter.register_fake
def _(x, group, size):
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _keep_arguments(ctx, inputs, output):
    """Keep an op's arguments after the tensor (group, size) for its backward."""
    ctx.arguments = inputs[1:]


all_reduce.register_autograd(lambda ctx, grad: (all_reduce(grad, *ctx.arguments), None), setup_context=_keep_arguments)
all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, *ctx.arguments), None, None), setup_context=_keep_arguments
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, *ctx.arguments), None, None), setup_context=_keep_arguments
)
all_to_all.register_autograd(lambda ctx, grad: (all_to_all(grad, *ctx.arguments), None), setup_context=_keep_arguments)
