"""The script that everyone copies: the solution.

Each fault hides the next one. A process that reads its rank from the environment can join the group; a backend that
the machine supports can connect; one device per rank keeps the ranks from competing for one GPU; a sharded batch
divides the work among the ranks instead of repeating it. Without the rest the script runs and the loss falls all the
same: with replicas that start different and are never synchronized, every rank trains its own model on a part of the
data.

The run trains one model if all replicas start equal and apply the same gradient, and that gradient must be the one of
the full batch: each rank divides its loss sum by the size of the full batch, and the gradients are summed over the
ranks. A mean of per-rank means is correct only if all shards have the same size.

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
    """Return the torch.device of this rank and the name of its backend, "nccl" or "gloo"."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        return torch.device("cuda", local_rank), "nccl"
    return torch.device("cpu"), "gloo"


def train_epoch(model, optimizer, data, batch_size, device):
    """Take one step per batch of batch_size samples of `data`; this rank computes its shard of each batch."""
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

    data[i] is the pair inputs (10,), target (1,), equal on all ranks. model: this rank's replica; training starts with
    the parameters of rank 0.
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
