"""What one process does: the loop that every layout is compared with.

It shares no code with the trainer: the whole global batch in one forward pass, the loss sum over the count, torch's own
clipping and optimizers. It imports torch and the model, and nothing else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist.models.dropout import DropoutAddress


def train(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    lrs: Sequence[float],
    clip_norm: float,
    seed: int,
    look: Callable[[int, float | None, float, int, dict[str, Tensor | None]], None],
) -> None:
    """One step, at the rate of `lrs`, per batch of (tokens, labels, sample numbers): the global batch of that step.

    look: called with the step, the loss, the global gradient norm, the number of tokens that count, and the gradients
    by name as they were before clipping (None for a parameter that was not used). A batch in which no token counts is
    passed over: it has no loss.
    """
    model.train()
    for step, (tokens, labels, samples) in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        positions = torch.arange(tokens.shape[1])
        address = DropoutAddress(seed, step, samples, positions)
        loss_sum, count = model(tokens, labels, address=address)
        if count == 0:
            look(step, None, 0.0, 0, {name: None for name, _ in model.named_parameters()})
            continue
        loss = loss_sum / count
        loss.backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        look(step, loss.item(), norm.item(), count.item(), grads)
        for group in optimizer.param_groups:
            group["lr"] = lrs[step]
        optimizer.step()


class Muon(torch.optim.Optimizer):
    """Muon by its definition: the singular values of a matrix' momentum go through a polynomial, and it is the update.

    Five times `3.4445 x - 4.7750 x^3 + 2.0315 x^5`, of values divided by the norm (Jordan et al. 2024); scaled by
    `0.2 sqrt(max(rows, columns))` (arXiv 2502.16982, section 2.2). The trainer has a matrix iteration in place of the
    decomposition.
    """

    def __init__(self, matrices: Sequence[Tensor], momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every matrix."""
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


class Both(torch.optim.Optimizer):
    """Two optimizers, for parameters of two kinds."""

    def __init__(self, *each: torch.optim.Optimizer):
        self.each = each

    @property
    def param_groups(self) -> list[dict]:
        return [group for one in self.each for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.each:
            one.zero_grad(set_to_none)

    def step(self) -> None:
        for one in self.each:
            one.step()
