"""A gradient that grows with the number of micro-batches.

This program runs, its loss falls and equals the loss of one process in every printed digit, but its gradient norm is
4 times too large with 4 micro-batches, 8 times with 8. AdamW hardly changes; everything that depends on the norm does.
Run it with: torchrun --standalone --nproc-per-node 2 THIS_FILE

Give three answers. INVARIANT: the key of the one invariant in INVARIANTS that the program breaks. LINE: the line that
breaks it, as its text or as its number in the original file. And fix the program: every micro-batch must still pass
through the stages separately.

Check it with: python -m exercises check unscaled_pipeline

Stub 21f95765.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "cut": "every layer belongs to exactly one stage",
    "order": "a stage sends gradients back in the order in which it received activations",
    "sum": "the optimizer takes a step after the gradients of all micro-batches have been accumulated, and not before",
    "mean": "a batch has one gradient however it is split: each micro-batch contributes its share of the mean loss",
    "norm": "the gradient norm covers the parameters of all stages",
}
INVARIANT = ""
LINE = ""


def received(like, rank):
    """Receive a tensor with the shape of `like` from `rank`."""
    tensor = torch.empty_like(like)
    dist.recv(tensor, rank)
    return tensor


def forward(stage, part):
    """Run one micro-batch through this rank's stage; return its input and its output, both of the shape of `part`."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    arrived = (received(part, rank - 1) if rank > 0 else part.clone()).requires_grad_()
    left = stage(arrived)
    if rank < last:
        dist.send(left.detach(), rank + 1)
    return arrived, left


def backward(arrived, left, target, micro_batches):
    """Run backward of one micro-batch; return its part of the batch's loss on the last stage, 0 on the others."""
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
    """Return the L2 norm of the gradients of all stages."""
    squares = torch.stack([parameter.grad.double().square().sum() for parameter in stage.parameters()]).sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def main(inputs, targets, layers, epochs=10, batch_size=12, micro_batches=4):
    """Train `layers`, split into one stage per rank. Return this rank's stage, and for every step the loss (0 except on
    the last rank) and the gradient norm.

    inputs (samples, 10), targets (samples, 10): equal on all ranks, as are the layers, each (n, 10) -> (n, 10).
    batch_size: a multiple of micro_batches.
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
