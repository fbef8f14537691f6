"""Split backward: delay the weight gradient: the solution, as it stands in minidist.simple.pipeline.

The input gradient (B) and the weight gradient (W) both need the gradient of the output, and neither needs the other.
The previous stage waits for the input gradient only, so the stage computes that one first, and computes the weight
gradient in a slot in which it would be idle.

Autograd walks from the output to the tensors that are asked for. For the weights it passes through the same inner
gradients again, so this split costs more work than one backward: it shows the order and not the gain. A zero-bubble
engine stores the gradient of each linear layer's output in B, and W is one product per layer; the fast trainer does
so. The price in memory is the same for both: until W has run, the micro-batch's activations stay. No hook of a
parameter is called, so the executor passes the gradients to the reducer itself.

Usual wrong answers:
* runs every W at the end, so that all micro-batches stay in memory
* replaces a gradient that the input has already
* writes the result into the list that it was given
* the package's own
* computes the weight gradients in the first half as well, and takes them away again
* returns one number for every result
* leaves out parameters whose gradient is all zeros
* takes it for granted that there is an input
* computes everything in the first half, and so gives the parameters a .grad
* starts the second half from ones, whatever the gradient of the output is
* does not keep the graph, which the second half needs
* keeps the graph in the second half too: activations are freed only with the output
* forgets the W that waits at the end
* writes its actions as lists, where an action is a pair
* returns the list that it was given if there is no backward in it
* returns None for parameters that the output does not depend on
* does not allow parameters that the output does not depend on
* runs each W right after its own B, as one backward would: the previous stage's next gradient waits for it
* runs the W that waits before the next B and not after it
* writes the gradients to .grad as well, where the reducer would count them again
* returns zeros
"""

import torch
from torch import Tensor, nn

from minidist.simple.pipeline import Action


def backward_of_input(out: Tensor, hidden: Tensor | None, grad: Tensor | None) -> None:
    """Compute the gradient of a stage's input only, into `hidden.grad`, and keep the graph for the weight gradients.

    out: the stage's output. hidden: its input; None on the first stage, where nothing is computed. grad: the gradient
    of `out`; None if `out` is the loss.
    """
    if hidden is not None:
        out.backward(grad, inputs=[hidden], retain_graph=True)


def backward_of_weights(out: Tensor, parameters: dict[str, nn.Parameter], grad: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of the parameters that `out` depends on; no `.grad` changes.

    Autograd repeats the computation of the input gradient for it; a zero-bubble engine (arXiv 2401.10241) does not.
    """
    found = torch.autograd.grad(out, list(parameters.values()), grad, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def split_backward(actions: list[Action]) -> list[Action]:
    """Split each backward: ("B", i) computes the gradient that the previous stage waits for, ("W", i) those of weights.

    Each W follows the next B, so that the previous stage gets its gradient before this one computes anything else.
    """
    result, waiting = [], []
    for kind, i in actions:
        result.append((kind, i))
        if kind == "B":
            result += waiting
            waiting = [("W", i)]
    return result + waiting
