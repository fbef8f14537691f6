"""Split backward: delay the weight gradient.

Split the backward of a stage in two: B computes the gradient of its input, for which the previous stage waits, and W
later those of its weights, for which nobody waits. Write the schedule, and both halves.

split_backward(actions): the actions of one stage, pairs (kind, i) with kind "F" or "B". Returns a new list with a
("W", i) for each ("B", i): right after the next B, and the last one at the end.
backward_of_input(out, hidden, grad): out is the stage's output, of any shape; grad is its gradient, of the same shape,
or None if out is the loss, (). Adds the gradient of the input to hidden.grad, and gives no parameter a `.grad`. On the
first stage hidden is None: do nothing.
backward_of_weights(out, parameters, grad): returns {name: gradient} for those of the `parameters` (by name, not empty)
that out depends on, and changes no `.grad`. The executor calls it once for each out, after backward_of_input; it may
call both for other micro-batches in between.
Example: split_backward turns F0 F1 B0 F2 B1 B2 into F0 F1 B0 F2 B1 W0 B2 W1 W2.
    With x = [[1, 2]], w = [[3, 4]], out = x w^T = [[11]] and grad = [[5]], backward_of_input gives x.grad = [[15, 20]]
    and leaves w.grad None; backward_of_weights(out, {"w": w}, grad) returns {"w": [[5, 10]]}.

Checked: the lists for GPipe, 1F1B and other orders; both halves against torch's backward in float64, for a loss and for
hidden states, several micro-batches in any order, a first stage and parameters that out does not depend on; that the
first half computes no weight gradient, counted in floating-point operations, and calls no hook of a parameter; and that
the second half frees the graph.

You may call:
    out.backward(grad, inputs=[tensor], retain_graph=True)   only these tensors get a .grad, and the graph is kept
    torch.autograd.grad(out, tensors, grad, allow_unused=True)   a tuple of gradients; None if out does not use one
    dict.keys(), dict.values(), zip(a, b), list.append(action)

Check it with: python -m exercises check split_backward

Stub 1604bd7c.
"""

import torch
from torch import Tensor, nn

from minidist.simple.pipeline import Action


def backward_of_input(out: Tensor, hidden: Tensor | None, grad: Tensor | None) -> None:
    """Compute the gradient of a stage's input only, into `hidden.grad`, and keep the graph for the weight gradients.

    out: the stage's output. hidden: its input; None on the first stage, where nothing is computed. grad: the gradient
    of `out`; None if `out` is the loss.
    """
    raise NotImplementedError("compute the gradient of the input, and keep the graph")


def backward_of_weights(out: Tensor, parameters: dict[str, nn.Parameter], grad: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of the parameters that `out` depends on; no `.grad` changes.

    Autograd repeats the computation of the input gradient for it; a zero-bubble engine (arXiv 2401.10241) does not.
    """
    raise NotImplementedError("return the gradients of the parameters by name")


def split_backward(actions: list[Action]) -> list[Action]:
    """Split each backward: ("B", i) computes the gradient that the previous stage waits for, ("W", i) those of weights.

    Each W follows the next B, so that the previous stage gets its gradient before this one computes anything else.
    """
    raise NotImplementedError("return the actions with a W for each B")
