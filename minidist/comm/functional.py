"""The door for model code: collectives as `torch.library` ops, with fake kernels and gradients.

A block that calls them compiles with `fullgraph=True`, and what they send is still counted, because the real kernel is
the door's. An op takes strings where the door takes objects, so it names its group by `Group.key`.

Gradients are those of the sum of all ranks' losses: what a rank's output contributes to every rank comes back as a sum.
"""

import torch
from torch import Tensor

from minidist.comm import collectives as door
from minidist.comm.group import find


@torch.library.custom_op("minidist::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of `x` (any shape) over the group, as a new tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    door.all_reduce(result, find(group))
    return result


@torch.library.custom_op("minidist::largest", mutates_args=())
def largest(x: Tensor, group: str) -> Tensor:
    """The elementwise largest `x` (any shape) of the group, as a new tensor. It has no gradient."""
    result = x.clone(memory_format=torch.contiguous_format)
    door.all_reduce(result, find(group), "max")
    return result


@torch.library.custom_op("minidist::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """The `x` (n, ...) of the `size` ranks of the group, concatenated in rank order: (size * n, ...)."""
    result = x.new_empty((size * x.shape[0], *x.shape[1:]))
    door.all_gather(result, x.contiguous(), find(group))
    return result


@torch.library.custom_op("minidist::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """This rank's part (n, ...) of the sum over the group of `x` (size * n, ...)."""
    result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    door.reduce_scatter(result, x.contiguous(), find(group))
    return result


@torch.library.custom_op("minidist::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Part i of `x`, in equal parts along dimension 0, goes to rank i; the result holds the parts received."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    door.all_to_all(result, x.contiguous(), find(group))
    return result


@largest.register_fake
@all_reduce.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(x, group, size):
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@reduce_scatter.register_fake
def _(x, group, size):
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@all_to_all.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_arguments(ctx, inputs, output):
    ctx.arguments = inputs[1:]


all_reduce.register_autograd(lambda ctx, grad: (all_reduce(grad, *ctx.arguments), None), setup_context=_keep_arguments)
all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, *ctx.arguments), None, None), setup_context=_keep_arguments
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, *ctx.arguments), None, None), setup_context=_keep_arguments
)
all_to_all.register_autograd(lambda ctx, grad: (all_to_all(grad, *ctx.arguments), None), setup_context=_keep_arguments)
