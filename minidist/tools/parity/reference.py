"""The reference: the training loop of one process with which every layout is compared.

It shares no code with the trainer: the whole global batch in one forward pass, the loss sum over the token count,
torch's own clipping and optimizers. It imports nothing but torch and the model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist.models.dropout import DropoutAddress


def train_reference(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    lrs: Sequence[float],
    clip_norm: float,
    seed: int,
    on_step: Callable[[int, float | None, float, int, dict[str, Tensor | None]], None],
) -> None:
    """Train a model in one process, without the package's trainer, one step per global batch.

    batches: (tokens, labels, sample numbers) of each global batch. lrs: the learning rate of each step. clip_norm: the
    largest global gradient norm; larger gradients are scaled down to it. seed: of the dropout masks. on_step: called
    with the step, the loss, the global gradient norm, the number of counted tokens, and the gradients by name before
    clipping (None for a parameter that was not used). A batch without counted tokens has no loss and is skipped.
    """
    model.train()
    for step, (tokens, labels, samples) in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        positions = torch.arange(tokens.shape[1])
        address = DropoutAddress(seed, step, samples, positions)
        loss_sum, count = model(tokens, labels, address=address)
        if count == 0:
            on_step(step, None, 0.0, 0, {name: None for name, _ in model.named_parameters()})
            continue
        loss = loss_sum / count
        loss.backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        on_step(step, loss.item(), norm.item(), count.item(), grads)
        for group in optimizer.param_groups:
            group["lr"] = lrs[step]
        optimizer.step()
