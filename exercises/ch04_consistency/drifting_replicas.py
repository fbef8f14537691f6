"""Replicas that drift while the loss falls.

This program trains replicas by local SGD: H steps without communication, then a weighted average of the parameters.
Its loss falls, but the replicas drift apart. The first layer's weight comes from another framework, which stores it as
(inputs, outputs). A run with H = 4 on 3 ranks, which have 30, 20 and 10 samples; the values right after each merge:

    step                                                    4        8       12       16       20       24
    loss, weighted mean over the replicas              0.0814   0.0084   0.0055   0.0046   0.0039   0.0035
    greatest difference between two replicas in
      weight of layer 0                                0.0127   0.0164   0.0213   0.0251   0.0281   0.0304
      bias of layer 0                                  0        0        0        0        0        0
      weight of layer 2                                0        0        0        0        0        0
      bias of layer 2                                  0        0        0        0        0        0
    before step 1 all four differences are 0; the velocities, which are not merged, differ after every step

Run it: torchrun --standalone --nproc-per-node 3 THIS_FILE

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
after every merge all replicas have the same parameters. Each replica keeps its own momentum, which is no fault.

Check it with: python -m exercises check drifting_replicas

Stub 88b296eb.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the parameters of rank 0",
    "data": "each sample belongs to one replica, which uses it once per epoch",
    "rounds": "all replicas merge after the same steps, and after their last one",
    "share": "a replica's share in a merge is that of its samples, and all shares sum to 1",
    "merge": "a merge overwrites every parameter by the weighted mean over all replicas",
    "momentum": "a replica's velocity is the decayed sum of its own gradients",
}
INVARIANT = ""
LINE = ""


def main(inputs, targets, model, counts, steps, h=4, lr=0.1, momentum=0.5):
    """Train a replica of `model` on every rank; return the mean loss over the replicas before each step.

    inputs (samples, 10), targets (samples, outputs): equal on all ranks. counts: the number of samples of each replica.
    model: rank 0's parameters are used, and the merged ones are left in it. h: steps between two merges.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parameters = list(model.parameters())
    for parameter in parameters:
        values = parameter.data.contiguous()
        dist.broadcast(values, 0)
        parameter.data.copy_(values)
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    start = sum(counts[:rank])
    mine, share = slice(start, start + counts[rank]), counts[rank] / sum(counts)
    losses = []
    for step in range(steps):
        errors = model(inputs[mine]) - targets[mine]
        loss = errors.square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
            velocity.mul_(momentum).add_(gradient)
            parameter.data.sub_(velocity, alpha=lr)
        if (step + 1) % h == 0 or step + 1 == steps:
            merge(parameters, share)
        total = share * loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    dist.destroy_process_group()
    return losses


def merge(parameters, share):
    """Overwrite the parameters of all ranks by the sum of share times parameters over the ranks, in one message."""
    flat = share * torch.cat([parameter.data.reshape(-1) for parameter in parameters])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data.reshape(-1).copy_(part)


if __name__ == "__main__":
    torch.manual_seed(0)
    samples, kernel = torch.rand(60, 10), torch.rand(10, 20) - 0.5
    network = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    network[0].weight = nn.Parameter(kernel.t())  # (outputs, inputs), without a copy
    seen = main(samples, samples.square().mean(dim=1, keepdim=True), network, (30, 20, 10), 24)
    if os.environ["RANK"] == "0":
        print("loss:", *(f"{loss:.4f}" for loss in seen[3::4]))
