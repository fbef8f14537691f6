"""Muon by its definition, for the reference. Imports nothing but torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ReferenceMuon(torch.optim.Optimizer):
    """Muon computed by singular value decomposition: the reference with which the trainer's Muon is compared.

    matrices: the 2-D parameters, which `step` updates in place. momentum: of Nesterov's kind. weight_decay: decoupled,
    as in AdamW. The learning rate is `param_groups[0]["lr"]`, at first 0.
    The update is the momentum matrix, divided by its Frobenius norm, with the polynomial `3.4445 x - 4.7750 x^3 +
    2.0315 x^5` applied five times to its singular values (Jordan et al. 2024), scaled by `0.2 sqrt(max(rows, columns))`
    (arXiv 2502.16982, section 2.2). The trainer iterates on the matrix instead of decomposing it.
    """

    def __init__(self, matrices: Sequence[Tensor], momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix in place. Every matrix must have a gradient."""
        (group,) = self.param_groups
        beta, lr = group["momentum"], group["lr"]
        for matrix in group["params"]:
            average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
            average.mul_(beta).add_(matrix.grad, alpha=1 - beta)
            u, values, v = torch.linalg.svd((1 - beta) * matrix.grad + beta * average, full_matrices=False)
            values = values / values.square().sum().sqrt()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.sub_(0.2 * max(matrix.shape) ** 0.5 * lr * (u * values) @ v)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with the interface of one; each updates parameters of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimizers' parameters: to None, or to zeros if not `set_to_none`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Update the parameters of all optimizers, in their order."""
        for optimizer in self.optimizers:
            optimizer.step()
