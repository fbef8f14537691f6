"""Replicas that drift while the loss falls: the solution.

For a contiguous tensor reshape(-1) is a view, and copy_ writes into the parameter. A weight that is stored transposed
has no flat view: reshape returns a copy, copy_ writes the mean into it, and the copy is dropped. So this one weight
is never merged. Each replica trains it by itself, together with biases and a second layer that are averaged, and
because the replicas follow each other in those, the loss goes on falling.

The table shows where to look: the start is equal, the velocities may differ, three tensors are right, so shares,
rounds and the all-reduce are right as well. The same fault occurs with .contiguous() and .flatten():
dist.all_reduce(parameter.data.contiguous()) sums into a copy. A comparison of replicas after a merge (chapter 07's
digests) finds it in the first round; a loss never does.

Usual wrong answers:
* makes the replicas equal by a broadcast from rank 0: the others have trained for nothing
* merges after every step, which hides the drift and costs the bytes that local steps save
* names the start as the invariant
* writes into contiguous(), which is a copy in the same case as reshape
* repairs the first parameter only, the one in the table
* writes into flatten(), which is a copy in the same case as reshape
* repaired, but does not merge after the last step if h does not divide the steps
* names the repaired line instead of the original one
* merges the weight that drifts in every step as well
* names the fault, and does not repair it
* names the line whose reshape only reads, and may return a copy
* repaired, but with equal shares for all replicas
* writes the mean in the order of the memory: the weight is permuted
* takes the different velocities, which are right, for the fault
* merges the velocities too, which is another algorithm
* repaired, but sets the velocities to 0 at every merge
* names everything, and trains nothing
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
INVARIANT = "merge"
LINE = "parameter.data.reshape(-1).copy_(part)"


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
        parameter.data.copy_(part.view(parameter.shape))


if __name__ == "__main__":
    torch.manual_seed(0)
    samples, kernel = torch.rand(60, 10), torch.rand(10, 20) - 0.5
    network = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    network[0].weight = nn.Parameter(kernel.t())  # (outputs, inputs), without a copy
    seen = main(samples, samples.square().mean(dim=1, keepdim=True), network, (30, 20, 10), 24)
    if os.environ["RANK"] == "0":
        print("loss:", *(f"{loss:.4f}" for loss in seen[3::4]))
