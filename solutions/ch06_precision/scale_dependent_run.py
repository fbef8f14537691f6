"""A loss scale that changes the result: the solution.

Adam's means start at 0. After n updates a constant gradient g has the mean (1 - beta**n) * g, and dividing by 1 -
beta**n makes up for that. n is the number of gradients in the mean. The program took the number of steps, which
includes the skipped ones. After three skipped steps, the first update divides 0.1 * g by 0.34, and the root of 0.001
* g * g by that of 0.004: 0.58 of the right update. The mean of the squares is divided by too large a number for about
a thousand steps, so later updates are too large.

The state of the optimizer is more than the two means: the number of updates belongs to it as well. torch.optim.Adam
counts its own calls of step, so it is right if a skipped step does not call it. Each further count (of a learning
rate schedule, of an average of the weights) needs the same question: does it count the steps or the updates? A
skipped step must not change more than the loss scale and the scaler's own counts.

Usual wrong answers:
* suspects ranks that skip alone; one process has the fault as well
* begins with a smaller scale, so that no step is skipped at the start
* suspects the clipping, which depends on the scale only if the norm is not divided by it
* names the start of the replicas as the invariant
* corrects the mean by the number of updates, and the mean of squares by the number of steps
* takes the scaler's count of good steps, which begins again whenever the scale changes
* starts the means and the count again after each skipped step
* names the repaired line instead of the original one
* names the fault but does not repair it
* keeps the model in float32, which avoids the skipped steps but not the cost of float32
* repaired, but without the broadcast: right only if the replicas start equal
* leaves the correction out, so that the first updates are too large
* only rank 0 counts its updates
* counts updates in place of good steps since the last skipped one, so that the scale grows in other steps
* names the line that skips a step, which is right to do so
* repaired, but omits the remainder of the samples if it is not divisible by the number of ranks
* repaired, but clips by the norm of the scaled gradient
* sends the gradients of every micro-batch
* accumulates in float32, but sends float16
* makes the count right by averaging a zero gradient in each skipped step, which weakens the first updates as much
* leaves out the steps skipped before the first update, and counts later ones
* repeats a skipped step until it succeeds, and so makes more updates
* names everything, and trains nothing
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
INVARIANT = "state"
LINE = "corrections = [1 - beta ** (step + 1) for beta in BETAS]"
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
    losses, good_steps, updates = [], 0, 0
    for _ in range(steps):
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
        updates += 1
        corrections = [1 - beta**updates for beta in BETAS]
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
