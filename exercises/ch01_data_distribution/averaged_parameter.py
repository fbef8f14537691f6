"""The loss falls and the replicas drift.

This program runs, its loss falls on every rank, and the numbers are wrong: the replicas drift apart, and none of
them is the model that one process would have trained. See it: torchrun --standalone --nproc-per-node 2 THIS_FILE

Three things are asked. INVARIANT: the key of the one rule in INVARIANTS that is broken. LINE: the line that breaks it,
by its number in the file as you got it, or its text. And the program, mended: every gradient goes over the network
once per step, and nothing else after the start.

Check it with: python -m exercises check averaged_parameter

Stub 44d9c7db.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "share": "every sample of a batch belongs to exactly one rank",
    "mean": "shares are equally large, so the mean over ranks of their mean losses is that of the batch",
    "gradient": "every replica takes its step with the same gradient, the mean over all ranks",
    "steps": "every rank takes the same number of steps",
}
INVARIANT = ""
LINE = ""


def mean_over_ranks(tensor):
    """Put the mean of all ranks' tensors in the place of each, shape by shape."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def on_gradient(parameter):
    """autograd calls this when the gradient of a parameter is complete."""
    mean_over_ranks(parameter.data)


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; returns it and this rank's loss after each step.

    inputs (samples, 10), targets (samples, 1): the same on all ranks. batch_size is a multiple of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.register_post_accumulate_grad_hook(on_gradient)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            share = slice(start + rank, start + batch_size, world_size)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return model, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    network, seen = main(samples, samples.sum(dim=1, keepdim=True).sin(), network)
    sums = [f"{parameter.sum().item():.6f}" for parameter in network.parameters()]
    print(f"rank {os.environ['RANK']}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, sums of the parameters {' '.join(sums)}")
