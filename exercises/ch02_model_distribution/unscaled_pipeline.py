"""A gradient as large as there are micro-batches.

This program runs, its loss falls and is the loss of one process in every digit that it prints, and its gradient norm
is 4 times too large with 4 micro-batches, 8 times with 8. AdamW hardly minds; whatever reads the norm does. See it:
torchrun --standalone --nproc-per-node 2 THIS_FILE

Three things are asked. INVARIANT: the key of the one rule in INVARIANTS that is broken. LINE: the line that breaks it,
by its number in the file as you got it, or its text. And the program, mended: every micro-batch still goes through the
stages by itself.

Check it with: python -m exercises check unscaled_pipeline

Stub 588ca4ca.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "cut": "every layer belongs to exactly one stage",
    "order": "a stage sends gradients back in the order in which it received activations",
    "sum": "a step is taken when the gradients of all its micro-batches have been added up, and not before",
    "mean": "a batch counts the same however it is cut: each micro-batch brings its part of the batch's mean loss",
    "norm": "the gradient norm is that of all stages together",
}
INVARIANT = ""
LINE = ""


def received(like, rank):
    """What that rank sends: a tensor of this shape."""
    tensor = torch.empty_like(like)
    dist.recv(tensor, rank)
    return tensor


def forward(stage, part):
    """One micro-batch through this rank's stage: (what came in, what went out). Both have the shape of the inputs."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    arrived = (received(part, rank - 1) if rank > 0 else part.clone()).requires_grad_()
    left = stage(arrived)
    if rank < last:
        dist.send(left.detach(), rank + 1)
    return arrived, left


def backward(arrived, left, target, micro_batches):
    """One micro-batch back through this rank's stage; its part of the batch's loss, on the last stage, else 0."""
    rank, last, loss = dist.get_rank(), dist.get_world_size() - 1, torch.zeros(())
    if rank < last:
        left.backward(received(left, rank + 1))
    else:
        loss = nn.functional.mse_loss(left, target)
        loss.backward()
    if rank > 0:
        dist.send(arrived.grad, rank - 1)
    return loss.item() / micro_batches


def global_norm(stage):
    """The length of the gradient of all stages' parameters."""
    squares = torch.stack([parameter.grad.double().square().sum() for parameter in stage.parameters()]).sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def main(inputs, targets, layers, epochs=10, batch_size=12, micro_batches=4):
    """Train `layers`, cut into as many stages as there are ranks. Returns this rank's stage, and of every step the loss
    (0 but on the last rank) and the gradient norm.

    inputs (samples, 10), targets (samples, 10): the same on all ranks, as are the layers, each (n, 10) -> (n, 10).
    batch_size is a multiple of micro_batches.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = nn.Sequential(*layers[rank * len(layers) // size : (rank + 1) * len(layers) // size])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            batch = slice(start, start + batch_size)
            optimizer.zero_grad()
            alive = [forward(stage, part) for part in inputs[batch].chunk(micro_batches)]
            parts = zip(alive, targets[batch].chunk(micro_batches), strict=True)
            losses.append(sum(backward(*held, target, micro_batches) for held, target in parts))
            norms.append(global_norm(stage))
            optimizer.step()
    dist.destroy_process_group()
    return stage, losses, norms


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(5)] + [nn.Linear(10, 10)]
    _, seen, lengths = main(samples, samples.flip(1).sin(), network)
    print(f"rank {os.environ['RANK']}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, first gradient norm {lengths[0]:.4f}")
