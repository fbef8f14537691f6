"""This is the training script that everyone copies, and it has six faults. Repair it, so that torchrun runs it on any
number of ranks, with or without GPUs, and every rank returns the model that a single process would have trained:

* Every process joins with the rank that torchrun assigned to it (RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in
  os.environ), and destroys the process group at the end of training.
* Each rank computes on its own GPU with nccl if the machine has a GPU per rank, otherwise on the CPU with gloo.
* The script takes one step per batch of batch_size samples, in the order of `data`; the last batch may be smaller. The
  ranks shard each batch: per epoch each sample is read once in total, also if a rank's shard of a batch is empty.
* All replicas start with the parameters of rank 0. Each step applies the gradient of the mean loss over the full batch.
* Each parameter is sent once, at the start, and each gradient once per step. Several may share a flat message.

The check does not let a program start processes: a DataLoader must not use num_workers.

Run it yourself with: torchrun --standalone --nproc-per-node 2 THIS_FILE
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

    data[i] is the pair inputs (10,), target (1,), of the model's dtype, equal on all ranks. model: this rank's replica;
    training starts with the parameters of rank 0.
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
