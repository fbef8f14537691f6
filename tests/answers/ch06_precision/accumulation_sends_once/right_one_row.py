"""All gradients and the number of tokens in one row, divided where the sum is complete."""

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
        row = torch.zeros(sum(parameter.numel() for parameter in parameters) + 1)
        gradients = [
            part.view_as(p) for part, p in zip(row[:-1].split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        for inputs, targets in micro_batches:
            (model(inputs).float() - targets).square().sum().backward()
            row[-1] += len(inputs)
            for gradient, parameter in zip(gradients, parameters, strict=True):
                gradient += parameter.grad
            model.zero_grad()
        dist.all_reduce(row)
        if row[-1]:
            row /= row[-1].clone()
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
