"""equals_one_process: the mean is never over more than three ranks"""

import torch
import torch.distributed as dist
from torch import nn

INVARIANT = "gradient"
LINE = "mean_over_ranks(parameter.data)"


def mean_over_ranks(tensor):
    """Put the mean of all ranks' tensors in the place of each, shape by shape."""
    dist.all_reduce(tensor)
    tensor /= min(dist.get_world_size(), 3)


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
