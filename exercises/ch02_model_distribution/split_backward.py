"""Split backward: delay the weight gradient.

Split the backward of a linear layer in two: the input gradient at once, since the previous stage waits for it, and
the weight gradient later, in a slot in which the stage would be idle.

_Linear: an autograd function of y = x W^T. x: (..., in). weight: (out, in). Its backward gets grad = dy, (..., out),
appends (name, x, dy) to the list `deferred`, and returns the gradient of x alone. DeferWeightGradients: a context
manager that calls _linear in place of F.linear; _linear uses _Linear for the weights in `names`, if there is no bias
and the input needs a gradient, and else F.linear itself. compute_weight_gradient: returns dW = dy^T x, (out, in),
summed over all other dimensions.
Example: x = [[1, 2]], W = [[3, 4]] and dy = [[5]]. Backward gives dx = [[15, 20]] and defers ("w", x, dy);
    compute_weight_gradient then gives dW = [[5, 10]].

Checked: both gradients against full backward, for x of two and three dimensions; that backward multiplies no matrix
for the weight gradient and calls no hook of the weight; several micro-batches in any order; a weight that is used
twice; weights that are not named, layers with a bias, and inputs without gradient.

You may call:
    ctx.save_for_backward(x, weight), ctx.saved_tensors; ctx.name = ...   anything that is no tensor
    F.linear(x, weight, bias); _Linear.apply(x, weight, name, deferred)
    Tensor.detach()   the same numbers without a graph: no gradient reaches the weight, and no hook of it is called
    Tensor.flatten(0, -2)   one dimension in place of all but the last; a @ b, Tensor.T

Check it with: python -m exercises check split_backward

Stub b44f4d8b.
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
        raise NotImplementedError("keep what backward needs; return x W^T")

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("defer the weight gradient; return the gradient of x, and None for the rest")


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
        raise NotImplementedError("return x W^T + bias, by _Linear if the weight gradient is to be deferred")


def compute_weight_gradient(deferred: DeferredWeightGradient) -> Tensor:
    """Return the gradient of a linear layer's weight, `dW = dy^T x`, (out, in). deferred: (name, x, dy)."""
    _, x, grad = deferred
    raise NotImplementedError("return the gradient of the weight, (out, in)")
