"""Blocks instead of strides, one message per step, and the place from what env:// reads by itself."""

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
        rank, size = dist.get_rank(), dist.get_world_size()
        cuts = [len(batch) * part // size for part in range(size + 1)]
        share = [data[index] for index in batch[cuts[rank] : cuts[rank + 1]]]
        optimizer.zero_grad()
        if share:
            inputs = torch.stack([sample for sample, _ in share]).to(device)
            targets = torch.stack([target for _, target in share]).to(device)
            loss = (model(inputs) - targets).square().sum() / len(batch)
            loss.backward()
        parameters = list(model.parameters())
        flat = torch.cat([(p.grad if share else torch.zeros_like(p)).flatten() for p in parameters])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()


def main(data, model, epochs=10, batch_size=32):
    """Train `model` on every rank that torchrun started, and return it.

    data: (inputs (10,), target (1,)) by index, the same on all ranks. model: of this rank; rank 0's counts.
    """
    device, backend = device_and_backend(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend)
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
