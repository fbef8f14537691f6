"""The script that everyone copies: the solution.

Each fault hides the next one. A process that is told its place joins; a backend that the machine has connects; a
device of its own keeps ranks out of each other's way; a share of every batch makes the work less instead of the same
work many times. All that runs, and the loss falls, also without the rest: with replicas that start apart and are
never brought together, every rank trains a model of its own on a part of the data.

What makes it one training is that all replicas start equal and apply the same gradient, which has to be that of the
whole batch: sums divided by the one count, then summed over ranks. Means of means are right only when all shares are
equal.

Usual wrong answers:
* the CPU, however many GPUs there are
* asks for a backend, and talks over gloo all the same
* batch_size samples on every rank, so fewer and larger steps
* every rank does all the work by itself, right values and nothing shared
* the parameters are ones, whatever was to be learned
* the model goes to the GPU, its inputs stay where they are
* asks for a device, and computes on the CPU all the same
* a rank without samples does not take part, and the others wait for ever
* an epoch for every batch of an epoch
* wrong on four ranks only, where gradients are halved
* every gradient is gathered twice, the second time for nothing
* the group is never ended
* the last rank tells the others how to start
* the lines for torchrun still use a loader that is not there
* a mean of means, right only where all shares are equal
* takes the second GPU where there is one
* nccl on every machine, also where there is no GPU
* replicas keep what they began with, right only when all began equal
* no gradient is ever sent, every rank trains a model of its own
* all ranks of a machine on its first GPU
* a DistributedSampler repeats samples until all ranks have equally many
* every process is rank 0 of 4, and each waits for three others
* rank 0 does all the work, the others wait for its gradient
* the rank among all is taken for the one on this machine
* the last, shorter batch is left out
* sums that nobody needs go over the network at the start
* means of shares are summed, a learning rate that grows with the ranks
* trains as soon as the file is imported
* joins, reads its share and ends, and trains nothing
"""

import os

import torch
import torch.distributed as dist
from torch import nn


class Network(nn.Module):
    """10 inputs, 20 hidden units, 1 output."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 20)
        self.output = nn.Linear(20, 1)

    def forward(self, inputs):  # (batch, 10) -> (batch, 1)
        return self.output(torch.relu(self.hidden(inputs)))


def device_and_backend(local_rank, local_world_size):
    """Where this rank computes (a torch.device), and over which backend it talks ("nccl" or "gloo")."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        return torch.device("cuda", local_rank), "nccl"
    return torch.device("cpu"), "gloo"


def train_epoch(model, optimizer, data, batch_size, device):
    """One step for every batch_size samples of `data`, of which this rank computes its share."""
    for start in range(0, len(data), batch_size):
        batch = range(start, min(start + batch_size, len(data)))
        share = [data[index] for index in batch[dist.get_rank() :: dist.get_world_size()]]
        optimizer.zero_grad()
        if share:
            inputs = torch.stack([sample for sample, _ in share]).to(device)
            targets = torch.stack([target for _, target in share]).to(device)
            loss = (model(inputs) - targets).square().sum() / len(batch)
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        optimizer.step()


def main(data, model, epochs=10, batch_size=32):
    """Train `model` on every rank that torchrun started, and return it.

    data: (inputs (10,), target (1,)) by index, the same on all ranks. model: of this rank; rank 0's counts.
    """
    device, backend = device_and_backend(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model.to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        train_epoch(model, optimizer, data, batch_size, device)
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(1000, 10, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(dim=1, keepdim=True).sin()
    trained = main(list(zip(inputs, targets, strict=True)), Network()).cpu()
    if os.environ["RANK"] == "0":
        print(f"mean squared error {nn.functional.mse_loss(trained(inputs), targets):.6f}")
