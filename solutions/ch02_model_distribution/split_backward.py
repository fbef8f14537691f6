"""Split backward: delay the weight gradient: the solution, as it stands in minidist.parallel.pipeline.split_backward.

The input gradient (B) and the weight gradient (W) both need the gradient of the output, and neither needs the other.
The previous stage waits for the input gradient only, so the stage computes that one first, and computes the weight
gradient in a slot in which it would be idle. No product is computed twice: the price is that x and dy stay in memory
until W has run.

The weight is detached, so autograd neither computes its gradient nor calls its hooks: the code that delays the weight
gradient must pass it to the gradient reducer itself.

Usual wrong answers:
* computes the weight gradient in backward and only accumulates it later
* defers the weight of every layer, named or not
* defers the weight of a layer with a bias, too
* calls F.linear without the layer's bias
* calls the package's symbols
* returns ones
* defers (name, dy, x)
* uses the first sequence of the batch only
* computes the input gradient a second time in compute_weight_gradient
* returns the output gradient, cut to size, as the input gradient
* a deferred gradient overwrites the one before it
* averages over the positions instead of summing
* does not defer the weight gradient, which is lost
* keeps one entry per name
* gives all deferred gradients one name
* passes the parameter itself to the function, so that autograd calls its hooks
* defers the weight gradient of a layer whose input needs no gradient, whose backward never runs
* returns zeros
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minidist.parallel.pipeline.split_backward import DeferredWeightGradient


class _Linear(torch.autograd.Function):
    """`F.linear` without bias, whose backward returns dx and appends the inputs of dW to a list."""

    @staticmethod
    def forward(ctx, x, weight, name, deferred):
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.deferred = name, deferred
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
        self._names, self._deferred = names, deferred

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
