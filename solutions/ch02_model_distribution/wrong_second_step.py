"""Wrong from the second step on: the solution.

`Leave` sums over the ranks. The products with the shards of `down` are partial results, which belong into the sum.
The shift is replicated: inside the sum it is counted once per rank. While it is 0 nothing is wrong, and biases
usually start at 0. So the first loss and all first gradients are right; then the optimizer moves the shift, and the
layer moves n times as far. All ranks make the same mistake, so comparing them with each other shows nothing;
comparing two numbers of ranks does.

The repair has a second half. Inside the sum the gradient of the shift came from the all-gather in the backward of
`Leave`, so each rank had the gradient from all tokens. Added after the reduce-scatter, the shift sees only the tokens
of its rank: its gradient is partial, and must be all-reduced like that of the norm. Megatron-LM's `RowParallelLinear`
adds its bias after the reduction, and marks it as `sequence_parallel` for the same reason.

Usual wrong answers:
* averages the replicas after each step, which each rank took with a different gradient
* sets the shift to 0 after every step, where the fault does not show
* names the distribution of the tokens as the cause
* divides the shift by the number of ranks inside of the sum, and so its gradient, which is not summed
* all-reduces all gradients, also those of sharded matrices
* halves the shift inside of the sum, which is right on two ranks only
* names the gradients, which the original program sums over all tokens
* averages over the ranks instead of summing
* gives LINE as in the repaired program, not as in the original
* names everything right and does not repair the program
* adds the shift after the sum, but still takes its gradient for complete
* reduces the norm of the first layer only
* names the line that computes the norm, which is right
* rank 0 skips the collective, and the other ranks wait for it
* all-reduces every gradient and discards some of the sums
* takes the ranks' losses, each of its own tokens, for wrong losses
* gathers all tokens once more to compute the full gradient of the norms
* names everything right, and does not train
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
