"""Gradients of bfloat16 micro-batches, whose numbers of tokens differ, are to be accumulated over the micro-batches and
summed over the ranks. Write main, which computes the gradients of each step and hands them to `update`.

model(inputs): (tokens, inputs) in bfloat16 -> (tokens, outputs). The loss of a token is the sum of its squared errors,
in float32. The gradient of a step is that of the mean loss over all tokens of all ranks and micro-batches.
Example: 2 ranks, a model with one weight w = 1, and all inputs 1. Rank 0 has micro-batches with the targets [0, 0] and
[4], rank 1 has [2] and one without tokens. The squared errors are 1, 1, 9 and 1 on 4 tokens, and the gradient is
    (2 + 2 - 6 - 2) / 4 = -1   on both ranks. A mean per micro-batch, averaged over all, would be another number.

Checked, on 1 to 4 ranks: the gradients, in float32, against one process in float64, also of many micro-batches that
each contribute a thousandth; that a step in which no rank has a token is skipped on all ranks; that backward of a
micro-batch runs before forward of the next; that nothing is sent between the first micro-batch and the last, and then
each gradient is all-reduced once per step, in float32, by itself or in one flat tensor. The ranks may also sum one
number per step, before the first micro-batch or after the last.

You may call:
    dist.init_process_group("gloo"), dist.destroy_process_group()
    dist.all_reduce(tensor)   replaces the tensor by the sum over all ranks
    Tensor.backward(), torch.autograd.grad(loss, parameters), torch.zeros_like(tensor, dtype=dtype)

Run it with: torchrun --standalone --nproc-per-node 2 THIS_FILE
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
