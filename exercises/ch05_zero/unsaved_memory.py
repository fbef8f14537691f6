"""A sharded optimizer that saves no memory.

This program runs, its loss falls, and its results are right. It claims to shard the optimizer, but saves no memory.
Measured with 241 parameters in float32, on every rank:

    ranks                                              1        2        3        4
    bytes of the flat parameter                      964      968      972      976
    bytes of the flat gradient                       964      968      972      976
    bytes of Adam's states                          1928     1936     1944     1952
    bytes sent in a step                               0      968     1296     1464
    greatest difference to one process
      after 100 steps, on any rank                     0    8e-08    9e-08    9e-08

All ranks have equal parameters at all times. Run it: torchrun --standalone --nproc-per-node 2 THIS_FILE

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
the same results, no more bytes sent per step than now, and on each rank only the optimizer states of its shard.

Check it with: python -m exercises check unsaved_memory

Stub a9f9d7bc.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all ranks start with the same parameters",
    "shards": "the flat parameter consists of one equal shard per rank, and its padding stays zero",
    "mean": "the gradient of an element is the mean over all ranks, on every rank that needs it",
    "states": "Adam's states of an element are stored on exactly one rank",
    "whole": "after a step every rank has all updated parameters",
}
INVARIANT = ""
LINE = ""


class ShardedAdam:
    """Adam whose states are sharded over the ranks.

    flat: the flat parameter, all parameters of the model and padding with zeros to equal shards. gradients: the flat
    gradient, in the same layout. shards, parts: both, split into shards. mine: this rank's shard, with its gradient.
    """

    def __init__(self, model):
        rank, size = dist.get_rank(), dist.get_world_size()
        parameters = list(model.parameters())
        shard = -(-sum(parameter.numel() for parameter in parameters) // size)
        self.flat = torch.zeros(size * shard, dtype=parameters[0].dtype)
        self.gradients = torch.zeros_like(self.flat)
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            view = self.flat[begin:end].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradients[begin:end].view_as(parameter)
        self.shards = list(self.flat.split(shard))
        self.parts = list(self.gradients.split(shard))
        self.mine = self.shards[rank]
        self.mine.grad = torch.zeros_like(self.mine)
        self.optimizer = torch.optim.Adam([self.flat], lr=0.01, eps=0.001)

    def step(self):
        """Reduce, gather, update."""
        dist.reduce_scatter(self.mine.grad, self.parts)
        dist.all_gather(self.parts, self.mine.grad)
        self.flat.grad = self.gradients.div_(dist.get_world_size())
        self.optimizer.step()
        self.gradients.zero_()

    def state_bytes(self):
        """Return the number of bytes of Adam's states on this rank."""
        kept = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in kept if tensor.dim())


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; return it, this rank's loss at each step, and the bytes of this rank's Adam states.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. batch_size: a multiple of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = ShardedAdam(model)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            share = slice(start + rank, start + batch_size, world_size)
            loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return model, losses, optimizer.state_bytes()


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    network, seen, state_bytes = main(samples, samples.sum(dim=1, keepdim=True).sin(), network)
    flat_bytes = 4 * sum(parameter.numel() for parameter in network.parameters())
    print(f"rank {os.environ['RANK']}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, states of Adam {state_bytes} bytes, "
          f"of {2 * flat_bytes} that one process has")  # fmt: skip
