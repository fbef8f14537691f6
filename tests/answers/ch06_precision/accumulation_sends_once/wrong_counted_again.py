"""equals_one_process: .grad is not emptied, so that every micro-batch is counted again in all that follow"""

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
