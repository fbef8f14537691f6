"""A loss scale that changes the result.

This program trains in float16 with a dynamic loss scale and Adam. Its loss falls, but its results are wrong.
Somebody has compared the parameters after the first updates with those of a program that does the same in float32,
after as many updates. Movement: norm of the change of all parameters, relative to float32:

    initial scale   processes   after 1 update   after 10   after 50
             2**8           1             1.00       1.00       1.00
            2**16           1             1.00       1.00       1.00
            2**20           1             0.58       0.90       1.01
            2**24           1             0.50       0.88       1.02
            2**24           4             0.50       0.88       1.02
            2**32           1             0.49       0.92       1.05

No parameter is infinite or NaN, all processes have equal parameters, and the loss falls with every initial scale.
Run it: torchrun --standalone --nproc-per-node 1 THIS_FILE, and then with other initial scales and with 4 processes

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
it makes as many steps as before, skips the same ones, and sends each gradient once per step, in float32.

Check it with: python -m exercises check scale_dependent_run

Stub 7c3897a5.
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "scale": "gradients are divided by the loss scale of their step before they are clipped",
    "sum": "gradients are accumulated in a dtype in which a small summand changes a large sum",
    "agree": "all ranks skip the same steps, and scale their losses by the same factor",
    "state": "the state of the optimizer depends only on the gradients of the updates made so far",
    "master": "the optimizer updates float32 master weights, which keep the digits that float16 would round away",
}
INVARIANT = ""
LINE = ""
BETAS, EPS, MAX_NORM = (0.9, 0.999), 1e-8, 1.0


def main(inputs, targets, model, steps=100, scale=2.0**16, growth_interval=2000, lr=0.01):
    """Train `model` by Adam on all ranks, each step on all samples, in micro-batches of one sample; return its master
    weights, in float32, and this rank's part of the loss at each step.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. model: in float32; rank 0's parameters are used.
    steps: includes the skipped ones. scale: the initial loss scale.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    for parameter in parameters:
        dist.broadcast(parameter.data, 0)
    masters = [parameter.detach().clone() for parameter in parameters]
    means = [torch.zeros_like(master) for master in masters]
    mean_squares = [torch.zeros_like(master) for master in masters]
    model.half()
    losses, good_steps = [], 0
    for step in range(steps):
        sums = [torch.zeros_like(master) for master in masters]
        losses.append(0.0)
        for sample in range(rank, len(inputs), world_size):
            error = model(inputs[sample].half()).float() - targets[sample]
            loss = error.square().sum() / len(inputs)
            (loss * scale).backward()
            losses[-1] += loss.item()
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
                parameter.grad = None
        for total in sums:
            dist.all_reduce(total)
        norm = sum(total.square().sum().item() for total in sums) ** 0.5 / scale
        if not math.isfinite(norm):
            scale, good_steps = scale / 2, 0
            continue
        factor = MAX_NORM / max(norm, MAX_NORM) / scale
        good_steps += 1
        if good_steps == growth_interval:
            scale, good_steps = scale * 2, 0
        corrections = [1 - beta ** (step + 1) for beta in BETAS]
        for total, mean, mean_square, master, parameter in zip(
            sums, means, mean_squares, masters, parameters, strict=True
        ):
            gradient = total * factor
            mean.lerp_(gradient, 1 - BETAS[0])
            mean_square.lerp_(gradient.square(), 1 - BETAS[1])
            master -= lr * (mean / corrections[0]) / ((mean_square / corrections[1]).sqrt() + EPS)
            parameter.data.copy_(master)
    dist.destroy_process_group()
    return masters, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.rand(32, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    trained, seen = main(samples, samples.sum(dim=1, keepdim=True), network, scale=2.0**24)
    if os.environ["RANK"] == "0":
        share = len(range(0, 32, int(os.environ["WORLD_SIZE"]))) / 32
        print(f"mean loss of rank 0's samples: {seen[0] / share:.3f} -> {seen[-1] / share:.3f}")
