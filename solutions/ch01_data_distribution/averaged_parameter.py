"""The loss falls and the replicas drift: the solution.

A step reads two things, the parameters and the gradient. Replicas stay equal if both are equal on all ranks, and only
the gradient needs the network for that: the parameters were made equal once, at the start.

The hook averaged the parameters, which pulls the replicas together before each step, and then each goes its own way
again with the gradient of its own share. The loss falls because every one of them does learn. A program that is used
by many had this fault and no test noticed: a falling loss proves nothing, equal parameters and the numbers of one
process do.

Usual wrong answers:
* the parameters are averaged after the step, which only plain SGD forgives
* every rank computes the whole batch, and nothing has to be sent
* the parameters still go over the network as well, for nothing
* the drift is hidden by giving all ranks the replica of rank 0 in the end
* whatever is wrong, it must be how the replicas started
* the mean is never over more than three ranks
* the line is named as it is when mended, not as it was
* the fault is found and not mended
* the line that is wrong is gone, and nothing averages the gradient
* the line is named where rank 0 tells the others how to start
* rank 0 does not take part, and the others wait for it
* all ranks take the gradient of rank 0, and the samples of others are lost
* the sum of the gradients in the place of their mean
* the unequal losses are taken for unequal shares
* everything is named, and nothing is trained
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
INVARIANT = "gradient"
LINE = "mean_over_ranks(parameter.data)"


def mean_over_ranks(tensor):
    """Put the mean of all ranks' tensors in the place of each, shape by shape."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def on_gradient(parameter):
    """autograd calls this when the gradient of a parameter is complete."""
    mean_over_ranks(parameter.grad)


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
