"""Eight ranks, and another loss.

This program trains a small network on a mesh of three axes: pipeline (pp), data (dp) and tensor (tp) parallelism.
Its loss falls on every mesh, and on some meshes it is not the loss of one process. The same samples and parameters:

    loss in step                      1        2        4        8       16
    one process                  6.8927   4.6789   2.6574   1.3843   0.9621
    pp 1 x dp 4 x tp 2           6.8927   4.6789   2.6574   1.3843   0.9621
    pp 2 x dp 1 x tp 1           6.8927   4.7304   2.6689   1.3970   0.9777
    pp 2 x dp 2 x tp 2           6.8927   4.7304   2.6689   1.3970   0.9777
    pp 4 x dp 1 x tp 1           6.8927   4.7304   2.6689   1.3970   0.9777

All ranks that hold the same parameter keep equal bits of it, on every mesh and in every step.

Run it: torchrun --standalone --nproc-per-node 8 THIS_FILE 2 2 2    (the sizes of pp, dp and tp; their product is 8)

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
losses and parameters are those of one process on every mesh, whatever the other arguments of main are.

Check it with: python -m exercises check eight_ranks

Stub f2da8551.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F

INVARIANTS = {
    "start": "all ranks begin with shards of rank 0's model",
    "mean": "the gradient is that of the mean loss of the global batch, however it is cut into micro-batches",
    "tied": "both stages with the embedding update it with the sum of the gradients of its two uses",
    "partial": "a parameter that all tensor-parallel ranks hold gets the same, complete gradient on each of them",
    "once": "the norm that decides on clipping counts each element of the full model once",
    "order": "the backward of a micro-batch gets the gradient of its own activation",
}
INVARIANT = ""
LINE = ""

# The dimension in which tensor-parallel ranks shard each kind of parameter; None: each of them holds all of it.
SHARDED = {"embedding": None, "scale": None, "up": 0, "down": 1}


def main(tokens, targets, model, mesh, steps, clip_norm=1.0, num_micro_batches=2):
    """Train on a mesh; return the loss of the global batch in each step, and this rank's parameters, by name.

    tokens, targets (samples,) int64: of the global batch, equal on all ranks and in all steps. model: {name: tensor} of
    the full network: "embedding" (vocabulary, hidden), also its last layer, and for each layer n "scale.n" (hidden,),
    "up.n" (inner, hidden) and "down.n" (hidden, inner); rank 0's is used. mesh: the sizes (pp, dp, tp).
    """
    dist.init_process_group("gloo")
    at, groups = make_groups(*mesh)
    for tensor in model.values():
        dist.broadcast(tensor, 0)
    parameters = shard(model, at, mesh)
    momenta = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    losses = []
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = None
        mine = slice(at.dp, None, mesh[1])
        loss = forward_backward(parameters, tokens[mine], targets[mine], len(tokens), num_micro_batches, at, groups)
        reduce_gradients(parameters, groups)
        norm = gradient_norm(parameters, at, groups)
        clip = min(1.0, clip_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, parameter in parameters.items():
                momenta[name].mul_(0.5).add_(parameter.grad, alpha=clip)
                parameter -= 0.3 * momenta[name]
        dist.all_reduce(loss)
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}


def make_groups(pp, dp, tp):
    """Return this rank's coordinates and process groups: "tp" and "dp", along these axes; "model", the ranks with one
    dp coordinate; "tied", the first and the last stage. A rank is (stage * dp + dp coordinate) * tp + tp coordinate.
    """
    rank = dist.get_rank()
    at = SimpleNamespace(rank=rank, pp=rank // (dp * tp), dp=rank // tp % dp, tp=rank % tp)
    at.is_first, at.is_last = at.pp == 0, at.pp == pp - 1
    at.previous, at.next = rank - dp * tp, rank + dp * tp  # the ranks of the stages beside this one
    grid = torch.arange(pp * dp * tp).view(pp, dp, tp)
    rows = {"tp": grid.view(-1, tp), "dp": grid.mT.reshape(-1, dp), "model": grid.transpose(0, 1).reshape(dp, -1)}
    if pp > 1:
        rows["tied"] = grid[[0, -1]].view(2, -1).mT
    groups = {}
    for name, sets in rows.items():
        for ranks in sets.tolist():
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[name] = group
    return at, groups


def is_sharded(name):
    """Return whether each tensor-parallel rank has another part of this parameter."""
    return SHARDED[name.partition(".")[0]] is not None


def shard(model, at, mesh):
    """Return this rank's parameters: the layers of its stage, sharded over tp, and the embedding on both ends."""
    pp, _, tp = mesh
    num_layers = sum(name.startswith("up.") for name in model)
    layers = range(at.pp * num_layers // pp, (at.pp + 1) * num_layers // pp)
    parameters = {}
    for name, tensor in model.items():
        kind, _, layer = name.partition(".")
        if int(layer) in layers if layer else at.is_first or at.is_last:
            own = tensor.chunk(tp, SHARDED[kind])[at.tp] if is_sharded(name) else tensor
            parameters[name] = own.clone().requires_grad_()
    return parameters


def forward_backward(parameters, tokens, targets, num_samples, num_micro_batches, at, groups):
    """Run all forwards, then all backwards; return this rank's part of the mean loss over `num_samples`."""
    parts = zip(tokens.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches), strict=True)
    some = next(iter(parameters.values()))
    total, hidden_size = some.new_zeros(()), next(p.shape[0] for name, p in parameters.items() if "scale" in name)
    outputs = []
    for part, wanted in parts:
        if at.is_first:
            hidden = received = parameters["embedding"][part]
        else:
            received = some.new_empty(len(part), hidden_size, requires_grad=True)
            dist.recv(received.data, at.previous)
            hidden = received
        out = run_layers(parameters, hidden, groups["tp"])
        if at.is_last:
            out = F.cross_entropy(out @ parameters["embedding"].T, wanted, reduction="sum") / num_samples
            total += out.detach() * (at.tp == 0)
        else:
            dist.send(out.detach(), at.next)
        outputs.append((received, out))
    for received, out in outputs:
        grad = None
        if not at.is_last:
            grad = torch.empty_like(out)
            dist.recv(grad, at.next)
        out.backward(grad)
        if not at.is_first:
            dist.send(received.grad, at.previous)
    return total


def run_layers(parameters, hidden, group):
    """Return hidden states (samples, hidden) after the layers of this stage."""
    for name in [name for name in parameters if name.startswith("scale.")]:
        layer = name.partition(".")[2]
        normed = F.rms_norm(hidden, hidden.shape[-1:]) * parameters[name]
        inner = torch.tanh(Enter.apply(normed, group) @ parameters[f"up.{layer}"].T)
        hidden = hidden + Leave.apply(inner @ parameters[f"down.{layer}"].T, group)
    return hidden


class Enter(torch.autograd.Function):
    """The beginning of a sharded layer: every rank uses all of the input, and its gradients are summed in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """The end of a sharded layer: the partial sums of all ranks are added; each of them gets the whole gradient."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def reduce_gradients(parameters, groups):
    """Sum the gradients of the data-parallel ranks, and of the two uses of the embedding."""
    for parameter in parameters.values():
        dist.all_reduce(parameter.grad, group=groups["dp"])
    if "tied" in groups:
        dist.all_reduce(parameters["embedding"].grad, group=groups["tied"])


def gradient_norm(parameters, at, groups):
    """Return the norm of the gradient of the full network."""
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in parameters.items():
        if is_sharded(name) or at.tp == 0:
            total += parameter.grad.double().square().sum()
    dist.all_reduce(total, group=groups["model"])
    return total.sqrt().item()


def make_model(seed, vocabulary=11, hidden=8, inner=12, num_layers=4):
    """Return the parameters of a full network, by name."""
    generator = torch.Generator().manual_seed(seed)
    model = {"embedding": torch.randn(vocabulary, hidden, generator=generator)}
    for layer in range(num_layers):
        model[f"scale.{layer}"] = torch.ones(hidden)
        model[f"up.{layer}"] = torch.randn(inner, hidden, generator=generator) / hidden**0.5
        model[f"down.{layer}"] = torch.randn(hidden, inner, generator=generator) / inner**0.5
    return model


def make_samples():
    """Return tokens and targets (22,): two samples of each token, with different targets."""
    tokens = torch.arange(22) * 5 % 11
    return tokens, (tokens * 3 + torch.arange(22) // 11) % 11


if __name__ == "__main__":
    sizes = tuple(map(int, sys.argv[1:])) or (2, 2, 2)
    found, _ = main(*make_samples(), make_model(0), sizes, steps=16)
    if os.environ["RANK"] == "0":
        print(
            f"pp {sizes[0]} x dp {sizes[1]} x tp {sizes[2]}:", *(f"{found[step - 1]:.4f}" for step in (1, 2, 4, 8, 16))
        )
