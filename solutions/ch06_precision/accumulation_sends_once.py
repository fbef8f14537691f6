"""Gradient accumulation with one reduction per step: the solution.

The gradient of a sum is the sum of the gradients, so the split into micro-batches does not matter, as long as every
rank divides by the same number and all gradients are added. A mean per micro-batch, averaged over micro-batches and
ranks, gives a token of a small micro-batch more weight than a token of a large one.

Accumulation costs no communication: many micro-batches save memory, and the number of bytes sent does not depend on
how many there are. A sum needs more significant bits than its terms: bfloat16 has eight, so adding 1/256 to a sum of
1 changes nothing. And a .grad that was reduced but not reset accumulates further, and its content is sent again.

Usual wrong answers:
* autograd accumulates in .grad, which is bfloat16
* every rank gathers the data of all ranks and computes everything itself
* every gradient is 1
* counts tokens in bfloat16, which does not have 301
* .grad is not reset, so each micro-batch counts again in all later ones
* all-reduces the token count for each micro-batch separately
* also divides the sum over ranks by their number
* does not destroy the process group
* only the last micro-batch of each rank counts
* the sums of the previous step are not reset
* rounds the targets to bfloat16, and computes the errors in it
* the mean of each micro-batch, averaged over micro-batches and ranks
* only rank 0 has the sum over ranks
* keeps the losses of all micro-batches for one backward at the end
* each gradient is sent in two halves
* each rank divides by its own token count, and averages over ranks
* a rank without tokens skips the step alone, and the others wait
* torch's DistributedDataParallel, which averages over ranks
* rounds the float32 sums to bfloat16 after each micro-batch
* right values, but sends the gradients of every micro-batch
* rounds the sums to bfloat16 before sending
* sends the sums in float64, twice the bytes needed
* skips a step with tokens whose gradients are all zero
* runs a step without tokens, with gradients of 0
* computes nothing; every gradient is 0
"""

import os

import torch
import torch.distributed as dist
from torch import nn


def main(model, steps, update):
    """Compute the gradients of each step, and call `update` with them.

    model: (tokens, inputs) -> (tokens, outputs), in bfloat16; equal on all ranks. The loss of a token is the sum of its
    squared errors. steps: for each step this rank's micro-batches, equally many on all ranks: (inputs, targets), with
    one token per row, in bfloat16 and float32. update: called once per step with the gradients, in the order of the
    parameters, in float32 and equal on all ranks; it changes the parameters.
    """
    dist.init_process_group("gloo")
    parameters = list(model.parameters())
    for micro_batches in steps:
        tokens = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches), dtype=torch.float64)
        dist.all_reduce(tokens)
        if tokens == 0:
            continue
        gradients = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        for inputs, targets in micro_batches:
            loss = (model(inputs).float() - targets).square().sum() / tokens
            loss.backward()
            for gradient, parameter in zip(gradients, parameters, strict=True):
                gradient += parameter.grad
                parameter.grad = None
        for gradient in gradients:
            dist.all_reduce(gradient)
        update(gradients)
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    masters = [parameter.detach().clone() for parameter in network.parameters()]
    network.bfloat16()
    norms = []

    def descend(gradients):
        norms.append(sum(gradient.square().sum() for gradient in gradients).sqrt().item())
        for master, parameter, gradient in zip(masters, network.parameters(), gradients, strict=True):
            master -= 0.05 * gradient
            parameter.data.copy_(master)

    data = torch.randn(20, 4, 8, 10, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    answers = data.sum(dim=-1, keepdim=True).sin()
    main(network, [list(zip(x.bfloat16(), y, strict=True)) for x, y in zip(data, answers, strict=True)], descend)
    print(f"rank {os.environ['RANK']}: gradient norms {norms[0]:.4f} ... {norms[-1]:.4f}")
