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
* uses the CPU even if there are GPUs
* calls device_and_backend, but always uses gloo
* takes batch_size samples on every rank, so the steps are fewer and larger
* broadcasts the parameters once more after training
* broadcasts the parameters before every epoch, which hides replicas that drift apart
* broadcasts the parameters while they are still on the CPU, which nccl cannot do
* every rank processes the full batch: right values, and no work is distributed
* returns ones as parameters
* moves the model to the GPU and leaves its inputs on the CPU
* calls device_and_backend, but always computes on the CPU
* a rank without samples skips the collective, and the other ranks wait for ever
* runs an epoch for every batch of an epoch
* halves the gradients, on four ranks only
* gathers every gradient twice, the second time for no purpose
* uses nccl on the ranks for which there is a GPU, and gloo on the others
* does not destroy the process group
* broadcasts the initial parameters of the last rank instead of rank 0
* the lines below `if __name__ == "__main__"` still use a loader that does not exist
* averages per-rank means, which is right only for equal shards
* uses GPUs even if the machine has fewer GPUs than ranks
* uses nccl on every machine, even without GPUs
* does not broadcast the initial parameters, which is right only for equal replicas
* does not reduce the gradients, so every rank trains its own model
* all ranks of a machine use its first GPU
* destroys the process group on rank 0 only
* uses a DistributedSampler, which repeats samples until all ranks have equally many
* every process is rank 0 of 4 and waits for three others
* each rank reads its shard and sends it to rank 0, which computes the gradients of all of them alone
* rank 0 computes every gradient and the other ranks wait for it
* uses RANK in place of LOCAL_RANK
* drops the last, smaller batch
* sends unused all-reduces at the start
* sums the per-rank means, so the learning rate grows with the number of ranks
* trains when the file is imported
* joins, reads its shard and returns without training
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
