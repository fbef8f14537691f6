"""Gradient accumulation with one reduction per step.

This program trains in bfloat16 with several micro-batches per step and rank. Its gradients differ from those of one
process with the same batch. Repair main, so that on any number of ranks

* the gradient of a step is that of the mean loss over all tokens of all ranks and micro-batches. Their token counts
  differ: a micro-batch may have no token, and all ranks skip a step in which no rank has a token;
* each rank accumulates the gradients of its micro-batches in float32: in bfloat16, adding 1/256 to a sum of 1 two
  hundred and fifty-six times changes nothing;
* each gradient is all-reduced once per step, in float32, after the last micro-batch, with at most one message per
  parameter; in addition, the ranks may sum one number before the first micro-batch;
* backward of a micro-batch runs before forward of the next one, so that one micro-batch's activations are in memory.

Run it with: torchrun --standalone --nproc-per-node 2 THIS_FILE

Check it with: python -m exercises check accumulation_sends_once

Stub 00b19e7c.
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
