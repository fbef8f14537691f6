"""Backward in two halves: the gradient of the input, which the stage before waits for, and that of the weights.

Both halves of a linear layer `y = x W^T` need the gradient of `y` and nothing of each other: `dx = dy W` and
`dW = dy^T x` (Qi et al. 2023, section 1 and figure 1). So the first goes on and the second is put aside, with the two
tensors it needs. Everything else in a block has small weights or none, and keeps its whole backward.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# One weight half that is still to do: the parameter's name, x (..., in) and dy (..., out).
DeferredWeightGradient = tuple[str, Tensor, Tensor]


class _Linear(torch.autograd.Function):
    """`F.linear` without bias, whose backward gives dx and puts the half of dW into a list."""

    @staticmethod
    def forward(ctx, x, weight, name, halves):
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.halves = name, halves
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.halves.append((ctx.name, x.detach(), grad))  # without the graph behind x, which would keep the part's input
        return grad @ weight, None, None, None


class DeferWeightGradients(TorchFunctionMode):
    """Within this context the backward of linear layers leaves their weights' gradients to be computed later.

    names: parameter to its name, of those to treat so; halves: where to put what is left to do, by whichever backward.
    Left whole are a layer whose input takes no gradient, as it has no first half, and one with a bias.
    """

    def __init__(self, names: Mapping[Tensor, str], halves: list[DeferredWeightGradient]):
        super().__init__()
        self._names, self._halves = names, halves

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self._linear(*args, **(kwargs or {})) if function is F.linear else function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or not x.requires_grad or weight not in self._names:
            return F.linear(x, weight, bias)
        # Detached: no gradient flows to the parameter itself, so no hook of it is called for it.
        return _Linear.apply(x, weight.detach(), self._names[weight], self._halves)


def weight_gradient(half: DeferredWeightGradient) -> Tensor:
    """The half that was left: `dW = dy^T x`, (out, in)."""
    _, x, grad = half
    return grad.flatten(0, -2).T @ x.flatten(0, -2)
