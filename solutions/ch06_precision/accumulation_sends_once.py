"""Gradient accumulation with one reduction per step: the solution.

The gradient of a sum is the sum of the gradients, so the split into micro-batches does not matter, as long as every
rank divides by the same number and all gradients are added. A mean per micro-batch, averaged over micro-batches and
ranks, gives a token of a small micro-batch more weight than a token of a large one.

Accumulation costs no communication: many micro-batches save memory, and the number of bytes sent does not depend on
how many there are. A sum needs more significant bits than its terms: bfloat16 has eight, so adding 1/256 to a sum of
1 changes nothing. And a .grad that was reduced but not reset accumulates further, and its content is sent again.

Usual wrong answers:
* autograd adds up in .grad, which is bfloat16
* every rank asks for the data of all ranks, and does the work of all of them
* every gradient is 1
* .grad is not emptied, so that every micro-batch is counted again in all that follow
* the number of tokens is summed over ranks for each micro-batch apart
* the sum over ranks is divided by their number as well
* the process group is not ended
* of each rank only the last micro-batch counts
* the sums of the step before are still there
* the mean of each micro-batch, averaged over micro-batches and ranks
* only rank 0 has the sum over ranks
* the losses of all micro-batches are kept, and one backward goes through all of them
* each gradient is sent in two halves
* each rank divides by its own number of tokens, and the sum over ranks by their number
* a rank without tokens leaves the step out by itself, and the others wait
* torch's DistributedDataParallel, which averages over ranks
* the sums are float32, and rounded to bfloat16 after each micro-batch
* right numbers, and every micro-batch's gradients are sent
* the sums are rounded before they go over the network
* the sums go over the network in twice as many bytes as needed
* a step without tokens is taken all the same, with gradients of 0
* nothing is computed, and every gradient is 0
"""

import os

import torch
import torch.distributed as dist
from torch import nn


def main(model, steps, update):
    """Compute the gradients of each step, and call `update` with them.

    model: (tokens, inputs) -> (tokens, outputs), in bfloat16; equal on all ranks. The loss of a token is the sum of its
    squared errors. steps: for each step this rank's micro-batches, equally many on all ranks: (inputs, targets), with
    one token per row. update: called once per step with the gradients, in the order of the parameters, in float32 and
    equal on all ranks; it changes the parameters.
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
