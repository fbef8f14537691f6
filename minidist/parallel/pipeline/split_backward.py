"""Split backward: compute input gradients now, which the previous stage waits for, and weight gradients later.

For a linear layer `y = x W^T`, the gradients `dx = dy W` and `dW = dy^T x` both need dy, but not each other (Qi et al.
2023, section 1 and figure 1). So backward computes dx at once and saves x and dy for dW. The other operations of a
block have small weights or none, and keep their full backward.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A weight gradient to be computed later: the parameter's name, x (..., in) and dy (..., out).
DeferredWeightGradient = tuple[str, Tensor, Tensor]


class _Linear(torch.autograd.Function):
    """`F.linear` without bias, whose backward returns dx and appends the inputs of dW to a list."""

    @staticmethod
    def forward(ctx, x, weight, name, deferred):
        ctx.save_for_backward(x, weight)
        ctx.name = name
        ctx.deferred = deferred
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.deferred.append((ctx.name, x.detach(), grad))  # detached: its graph would keep the part's input
        return grad @ weight, None, None, None


class DeferWeightGradients(TorchFunctionMode):
    """A context manager in which linear layers defer their weight gradients in backward.

    names: the name of each weight whose gradient is deferred. deferred: the list to which backward appends one entry
    per deferred gradient, for `compute_weight_gradient`. Layers with a bias, and layers whose input needs no gradient,
    keep their full backward.
    """

    def __init__(self, names: Mapping[Tensor, str], deferred: list[DeferredWeightGradient]):
        super().__init__()
        self._names = names
        self._deferred = deferred

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self._linear(*args, **(kwargs or {})) if function is F.linear else function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or not x.requires_grad or weight not in self._names:
            return F.linear(x, weight, bias)
        # Detached: no gradient flows to the parameter itself, so its hooks are not called.
        return _Linear.apply(x, weight.detach(), self._names[weight], self._deferred)


def compute_weight_gradient(deferred: DeferredWeightGradient) -> Tensor:
    """Return the gradient of a linear layer's weight, `dW = dy^T x`, (out, in). deferred: (name, x, dy)."""
    _, x, grad = deferred
    return grad.flatten(0, -2).T @ x.flatten(0, -2)
