"""Micro-batches as tensors of one row, and sums that are added to by index."""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "count": "a loss is divided by the number of samples of the whole batch, once, before backward",
    "sum": "what micro-batches contribute is added up where the small is not lost beside the large",
    "once": "a gradient goes over the network once per step, when all micro-batches have contributed",
    "master": "a step is made on a copy of the parameters that keeps what bfloat16 would round away",
}
INVARIANT = "sum"
LINE = "sums = [torch.zeros_like(parameter) for parameter in parameters]"


def main(inputs, targets, model, epochs=4, batch_size=256, lr=0.05):
    """Train `model` on all ranks, in micro-batches of one sample; returns the masters of its parameters, in float32,
    and the sum of this rank's losses after each step.

    inputs (samples, 10), targets (samples, 1): the same on all ranks. model: in float32; rank 0's counts.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    for parameter in parameters:
        dist.broadcast(parameter.data, 0)
    masters = [parameter.detach().clone() for parameter in parameters]
    model.bfloat16()
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            batch = range(start, min(start + batch_size, len(inputs)))
            sums = [torch.zeros_like(master) for master in masters]
            losses_of_step = []
            for sample in batch[rank::world_size]:
                row = slice(sample, sample + 1)
                error = model(inputs[row].bfloat16()) - targets[row]
                loss = error.square().sum() / len(batch)
                losses_of_step.append(loss.item())
                for index, gradient in enumerate(torch.autograd.grad(loss, parameters)):
                    sums[index] = sums[index] + gradient.float()
            for total, master, parameter in zip(sums, masters, parameters, strict=True):
                dist.all_reduce(total)
                master -= lr * total
                parameter.data.copy_(master)
            losses.append(sum(losses_of_step))
    dist.destroy_process_group()
    return masters, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.rand(1024, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    trained, seen = main(samples, samples.sum(dim=1, keepdim=True), network, batch_size=1024, lr=0.01)
    if os.environ["RANK"] == "0":
        share = len(range(0, 1024, int(os.environ["WORLD_SIZE"]))) / 1024
        print(f"mean loss of rank 0's samples: {seen[0] / share:.3f} -> {seen[-1] / share:.3f}")
