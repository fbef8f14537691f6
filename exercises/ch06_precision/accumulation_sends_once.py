"""Many micro-batches, one message.

This program trains in bfloat16, every step in several micro-batches on each rank, and gives every step another
gradient than one process with one batch. Mend main, so that on any number of ranks

* a step's gradient is that of the mean loss over all tokens of all ranks and micro-batches, whose numbers differ: a
  micro-batch may have no token at all, and a step in which no rank has one is left out by all;
* what micro-batches contribute is added up in float32 on each rank: of 256 contributions of 1/256 to a sum of 1,
  bfloat16 keeps none;
* each gradient goes over the network once per step, in float32, after the last micro-batch, as one message per
  parameter or fewer; besides, the ranks may sum one number before the first micro-batch;
* backward of a micro-batch comes before forward of the next one, so that the memory for activations is that of one.

Run it yourself with: torchrun --standalone --nproc-per-node 2 THIS_FILE

Check it with: python -m exercises check accumulation_sends_once

Stub b6982c8e.
"""

import os

import torch
import torch.distributed as dist
from torch import nn


def main(model, steps, update):
    """Compute the gradients of each step, and give them to `update`.

    model: (tokens, inputs) -> (tokens, outputs), all in bfloat16; the same on all ranks. The loss of a token is the sum
    of its squared errors. steps: of each step this rank's micro-batches, as many as on the other ranks: (inputs,
    targets), with one row per token. update: called once per step with the gradients, in the order of the parameters,
    float32, the same on all ranks; it changes the parameters.
    """
    dist.init_process_group("gloo")
    parameters = list(model.parameters())
    for micro_batches in steps:
        for inputs, targets in micro_batches:
            loss = (model(inputs) - targets).square().sum(dim=1).mean() / len(micro_batches)
            loss.backward()
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        update([parameter.grad.float() for parameter in parameters])
        model.zero_grad()
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
