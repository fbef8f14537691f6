"""This program runs and its loss falls on every rank. On one rank its results are right, on several they are wrong.
Measured on 2 ranks, with 3 layers, beside one process with the same tokens:

    step                                1       2       5       20      60
    loss of the step, sum of both ranks 3.1578  2.5279  1.3150  0.2548  0.0839
    loss of the step, one process       3.1578  2.5432  1.3220  0.2561  0.0827
    greatest difference between the ranks in
      norm                              0       0       0       0       0
      shift                             0       0       0       0       0
    greatest difference to one process in
      norm                              0       0.0010  0.0044  0.011   0.043
      up                                6e-08   0.0012  0.0098  0.032   0.056
      down                              3e-08   0.0036  0.0098  0.037   0.060
      shift                             9e-10   0.0017  0.012   0.069   0.089

Run it: torchrun --standalone --nproc-per-node 2 THIS_FILE

Each rank holds a shard of every feed-forward layer and, between layers, a shard of the tokens (sequence parallelism).
This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program,
on any number of ranks: it may have to change in more than one line, and all-reduces no more than norms and shifts.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "tokens": "between the layers every token is on exactly one rank",
    "features": "inside a layer every hidden feature is on exactly one rank",
    "terms": "every term of a layer's output is counted once, however many ranks there are",
    "pair": "an all-gather before the layer is paired with a reduce-scatter after it; in backward they are exchanged",
    "gradient": "all replicas of a parameter are updated with the same gradient, the sum over all tokens",
    "loss": "the loss of a rank is the sum over its own tokens, divided by the number of tokens of all ranks",
}
INVARIANT = "terms"
LINE = 'return x + Leave.apply(hidden @ layer["down"].T + layer["shift"])'


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
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


def block(x, layer):
    """A residual feed-forward layer with a norm before it: (tokens / ranks, h) -> (tokens / ranks, h)."""
    normalized = nn.functional.rms_norm(x, layer["norm"].shape, layer["norm"])
    hidden = torch.tanh(Enter.apply(normalized) @ layer["up"].T)  # (tokens, f / ranks)
    return x + Leave.apply(hidden @ layer["down"].T) + layer["shift"]


def has_full_gradient(name):
    """Whether every rank has the full gradient of its shard of this parameter, from the tokens of all ranks."""
    return name in ("up", "down")


def main(inputs, targets, layers, epochs=10):
    """Train `layers` on all ranks; return this rank's shards of them, and the loss of its tokens at each step.

    inputs, targets (tokens, h): equal on all ranks. layers: norm (h,), up (f, h), down (h, f) and shift (h,) of each
    layer, equal on all ranks. The number of tokens and f are multiples of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own_layers = []
    for layer in layers:
        own = {"norm": layer["norm"], "up": layer["up"].chunk(size)[rank]}
        own |= {"down": layer["down"].chunk(size, 1)[rank], "shift": layer["shift"]}
        own_layers.append({name: nn.Parameter(tensor.clone()) for name, tensor in own.items()})
    optimizer = torch.optim.Adam([tensor for layer in own_layers for tensor in layer.values()], lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        x = inputs.chunk(size)[rank]
        for layer in own_layers:
            x = block(x, layer)
        loss = (x - targets.chunk(size)[rank]).square().sum() / targets.numel()
        loss.backward()
        for layer in own_layers:
            for name, parameter in layer.items():
                if not has_full_gradient(name):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return own_layers, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    h, f = 8, 16
    shapes = {"norm": (h,), "up": (f, h), "down": (h, f), "shift": (h,)}
    scale = {"norm": 0, "up": 0.3, "down": 0.3, "shift": 0}
    start = [{n: scale[n] * torch.randn(shape) + (n == "norm") for n, shape in shapes.items()} for _ in range(3)]
    samples = torch.randn(60, h)
    trained, losses = main(samples, samples.flip(1).sin(), start, epochs=60)
    shifts = " ".join(f"{layer['shift'].abs().mean().item():.6f}" for layer in trained)
    print(f"rank {os.environ['RANK']}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, mean size of the shifts {shifts}")
