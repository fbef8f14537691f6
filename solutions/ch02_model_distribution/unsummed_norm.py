"""Diverging replicas of a norm: the solution.

A rank has the full gradient of a parameter shard if all tokens pass through that shard on this rank. That holds for
`up` and `down`, although each rank has only a shard of them. `norm` is replicated, and is applied to this rank's
tokens only: a full parameter does not imply a full gradient.

The loss falls on every rank, because each rank trains a norm that fits its own tokens. The layer then computes a
mixture of different models, which no single checkpoint can represent. Megatron-LM #1446 and GPT-NeoX #1257 report
this fault. In this package the field `partial` in a parameter's description prevents it.

Usual wrong answers:
* the copies are averaged after each step, each of which was taken with another gradient
* the drift is hidden by giving all ranks the norms of rank 0 in the end
* whatever is wrong, it must be how the tokens are distributed
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
    "pair": "an all-gather before the layer is paired with a reduce-scatter after it; in backward they are exchanged",
    "whole": "all replicas of a parameter are updated with the same gradient, the sum over all tokens",
    "loss": "the loss of a rank is the sum over its own tokens, divided by the number of tokens of all ranks",
}
INVARIANT = "whole"
LINE = 'return name in ("up", "down", "norm")'


class Enter(torch.autograd.Function):
    """All-gather the tokens of all ranks: (tokens / ranks, h) -> (tokens, h)."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad)


class Leave(torch.autograd.Function):
    """Reduce-scatter: sum over the ranks and keep this rank's tokens, (tokens, h) -> (tokens / ranks, h)."""

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
    """A residual feed-forward layer with a norm before it: (tokens / ranks, h) -> (tokens / ranks, h)."""
    normalised = nn.functional.rms_norm(x, layer["norm"].shape, layer["norm"])
    hidden = torch.tanh(Enter.apply(normalised) @ layer["up"].T)  # (tokens, f / ranks)
    return x + Leave.apply(hidden @ layer["down"].T) + layer["shift"]


def is_whole(name):
    """Whether every rank has the full gradient of its shard of this parameter, from the tokens of all ranks."""
    return name in ("up", "down")


def main(inputs, targets, layers, epochs=10):
    """Train `layers` on all ranks; return this rank's shards of them, and the loss of its tokens at each step.

    inputs, targets (tokens, h): equal on all ranks. layers: norm (h,), up (f, h), down (h, f) and shift (h,) of each
    layer, equal on all ranks. The number of tokens and f are multiples of the number of ranks.
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
