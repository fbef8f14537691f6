"""This program runs and its loss falls on every rank, but its results are wrong. Somebody has compared the parameters
after training with those of one process that reads the same batches: the largest difference of an element between two
ranks, and between rank 0 and the one process. In the last line every sample was repeated, so that all ranks train on
the same ones.

    ranks   samples    epochs   between two ranks   rank 0 and one process   loss of rank 0
        1   as given       10                   -                        0            0.202
        2   as given        1               0.011                    0.064            0.317
        2   as given       10               0.015                    0.191            0.199
        2   as given       50               0.014                    0.724            0.035
        4   as given       10               0.017                    0.185            0.044
        2   repeated       10                   0                        0            0.202

Before training the parameters are equal on all ranks. The numbers are the same in every run.
Run it: torchrun --standalone --nproc-per-node 2 THIS_FILE

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
it sends every gradient once per step, alone or together with others, and nothing else after the start.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "share": "every sample of a batch belongs to exactly one rank",
    "mean": "all shards have the same size, so the mean of the per-rank mean losses is the mean loss of the batch",
    "gradient": "every replica applies the same gradient, the mean over all ranks",
    "steps": "every rank takes the same number of steps",
}
INVARIANT = "gradient"
LINE = "mean_over_ranks(parameter.data)"


def mean_over_ranks(tensor):
    """Replace each rank's tensor by the mean over all ranks, in place."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def on_gradient(parameter):
    """Hook that autograd calls when the gradient of a parameter is complete."""
    mean_over_ranks(parameter.grad)


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; return it and this rank's loss at each step.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. batch_size: a multiple of the number of ranks.
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
