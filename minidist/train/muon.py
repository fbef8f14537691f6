"""Muon: the momentum of a matrix, with all its singular values made about 1, is the update.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The update is scaled as by Liu et al.
2025 (arXiv 2502.16982, section 2.2), to the root mean square that updates of AdamW have, so that one learning rate and
one weight decay suit both.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Of the polynomial a x + b x^3 + c x^5, chosen by the source for its slope at 0: five times it takes singular values
# from some 0.002 on to between 0.7 and 1.2, which is as good as 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2


class Muon(torch.optim.AdamW):
    """AdamW, but groups with `shapes` are Muon's.

    groups: as of torch's optimizers. Muon's have beside `params`: `shapes`, of the matrices, as a parameter may hold
    its matrix flat; `momentum`; `steps`, Newton-Schulz iterations. `state` and `param_groups` are as in any optimizer.
    """

    def __init__(self, groups: Iterable[dict], **adamw):
        groups = list(groups)
        super().__init__([{"shapes": None, **group} for group in groups], **adamw)

    def __setstate__(self, state: dict) -> None:
        # Adam's own would look for its count of steps in every state, to bring those of old releases up to date.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient; gradients are left as they are."""
        groups = self.param_groups
        for group in groups:
            if group["shapes"] is not None:
                self._muon(group)
        try:
            self.param_groups = [group for group in groups if group["shapes"] is None]
            super().step(closure)
        finally:
            self.param_groups = groups

    def _muon(self, group: dict) -> None:
        lr, momentum = group["lr"], group["momentum"]
        for parameter, shape in zip(group["params"], group["shapes"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
            ahead = parameter.grad.lerp(average, momentum)  # Nesterov's
            update = orthogonal(ahead.view(shape), group["steps"])
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.sub_(update.view_as(parameter), alpha=lr * scale(shape))


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """The matrix (m, n) with its singular values near 1: `steps` Newton-Schulz iterations in its own dtype.

    The norm bounds the largest singular value by 1, from where the iteration does not diverge.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T  # products of the smaller size
    x = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


def scale(shape: tuple[int, int]) -> float:
    """What brings an orthogonal matrix of this shape to AdamW's root mean square."""
    return _RMS_OF_ADAMW * math.sqrt(max(shape))
