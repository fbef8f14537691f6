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
