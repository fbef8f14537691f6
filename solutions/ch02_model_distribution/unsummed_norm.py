"""The same norm, and two gradients: the solution.

A rank has the whole gradient of a parameter if it sees all tokens where that parameter is used. `up` and `down` do,
although each rank holds only a part of them. `norm` is held whole, and sees a part: being held whole and having the
whole gradient are two different things.

The loss falls on every rank, because each trains a norm that suits its own tokens. What the layer then computes is a
mixture of different models, which nobody can save as one. Megatron-LM #1446 and GPT-NeoX #1257 are this fault. In
this package it is one word in the table of facts, `partial`.

Usual wrong answers:
* the copies are averaged after each step, each of which was taken with another gradient
* the drift is hidden by giving all ranks the norms of rank 0 in the end
* whatever is wrong, it must be how the tokens are shared out
* all gradients are summed, also those of parts that no two ranks share
* the mean over the ranks in the place of the sum
* the line is named as it is when mended, not as it was
* everything is named, and the program is as it was
* the norm is summed, and the shift is not any more
* only the first layer's norm is summed
* the line that normalises, which is right
* rank 0 does not take part, and the others wait for it
* all gradients are sent, and of some the sum is thrown away
* losses that differ between ranks are taken for losses that are wrong
* norms are told of all tokens, by sending these once more
* everything is named, and nothing is trained
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "tokens": "between the layers every token is on exactly one rank",
    "features": "inside a layer every hidden feature is on exactly one rank",
    "pair": "what enters by an all-gather leaves by a reduce-scatter, and the other way round in backward",
    "whole": "all copies of a parameter take their step with one gradient, the sum over all tokens",
    "loss": "every rank's loss is the sum over its own tokens, divided by the number of tokens of all ranks",
}
INVARIANT = "whole"
LINE = 'return name in ("up", "down", "norm")'


class Enter(torch.autograd.Function):
    """The tokens of all ranks, (tokens / ranks, h) -> (tokens, h)."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad)


class Leave(torch.autograd.Function):
    """The sum over the ranks, of this rank's tokens: (tokens, h) -> (tokens / ranks, h)."""

    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return Enter.forward(ctx, grad)


def reduce_scatter(x):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size())]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


def block(x, layer):
    """A feed-forward layer on normalised tokens, added to them: (tokens / ranks, h) -> (tokens / ranks, h)."""
    normalised = nn.functional.rms_norm(x, layer["norm"].shape, layer["norm"])
    hidden = torch.tanh(Enter.apply(normalised) @ layer["up"].T)  # (tokens, f / ranks)
    return x + Leave.apply(hidden @ layer["down"].T) + layer["shift"]


def is_whole(name):
    """Whether every rank has the whole gradient of what it holds of a parameter, from the tokens of all ranks."""
    return name in ("up", "down")


def main(inputs, targets, layers, epochs=10):
    """Train `layers` on all ranks; returns what this rank holds of them, and the loss of its tokens after each step.

    inputs, targets (tokens, h): the same on all ranks. layers: of each layer norm (h,), up (f, h), down (h, f) and
    shift (h,), the same on all ranks. Tokens and f are multiples of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    held = []
    for layer in layers:
        mine = {"norm": layer["norm"], "up": layer["up"].chunk(size)[rank]}
        mine |= {"down": layer["down"].chunk(size, 1)[rank], "shift": layer["shift"]}
        held.append({name: nn.Parameter(tensor.clone()) for name, tensor in mine.items()})
    optimizer = torch.optim.Adam([parameter for layer in held for parameter in layer.values()], lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        x = inputs.chunk(size)[rank]
        for layer in held:
            x = block(x, layer)
        loss = (x - targets.chunk(size)[rank]).square().sum() / targets.numel()
        loss.backward()
        for layer in held:
            for name, parameter in layer.items():
                if not is_whole(name):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return held, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    h, f = 8, 16
    shapes = {"norm": (h,), "up": (f, h), "down": (h, f), "shift": (h,)}
    start = [{name: 0.3 * torch.randn(shape) + (name == "norm") for name, shape in shapes.items()} for _ in range(3)]
    samples = torch.randn(60, h)
    trained, seen = main(samples, samples.flip(1).sin(), start, epochs=60)
    norms = " ".join(f"{layer['norm'].sum().item():.6f}" for layer in trained)
    print(f"rank {os.environ['RANK']}: loss {seen[0]:.4f} -> {seen[-1]:.4f}, sums of the norms {norms}")
