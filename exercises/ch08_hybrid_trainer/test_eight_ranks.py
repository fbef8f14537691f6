"""Tests of eight_ranks: the reference is a loop in one process, in float64, with formulas of its own."""

import torch

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

VOCABULARY, HIDDEN, INNER, LAYERS, SAMPLES = 7, 4, 6, 4, 9  # nine samples on two ranks, in two micro-batches
SPLIT = {"up": 0, "down": 1}
TOLERANCE = 1e-9  # float64 sums in another order
KEYS = ("start", "mean", "tied", "partial", "once", "order")
NEVER = 1e6  # a limit that no norm reaches


def data():
    """Tokens and targets that no network predicts exactly."""
    tokens = torch.arange(SAMPLES) * 2 % VOCABULARY
    return tokens, (tokens * 3 + torch.arange(SAMPLES) % 2) % VOCABULARY


def model_of(seed):
    """Parameters in float64, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-8, 9, shape, generator=generator, dtype=torch.float64) / 8

    model = {"embedding": draw(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        model |= {f"scale.{layer}": draw(HIDDEN) + 2, f"up.{layer}": draw(INNER, HIDDEN)}
        model[f"down.{layer}"] = draw(HIDDEN, INNER) / 2
    return model


def one_process(steps, clip_norm):
    """The losses and the last parameters, from rank 0's model."""
    (tokens, targets), model = data(), model_of(0)
    momenta, losses = dict.fromkeys(model, 0.0), []
    for _ in range(steps):
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        x = leaves["embedding"][tokens]
        for layer in range(LAYERS):
            size = (x.square().mean(1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
            inner = (x / size * leaves[f"scale.{layer}"]).matmul(leaves[f"up.{layer}"].t()).tanh()
            x = x + inner.matmul(leaves[f"down.{layer}"].t())
        scores = x.matmul(leaves["embedding"].t())
        loss = (scores.logsumexp(1) - scores[torch.arange(SAMPLES), targets]).mean()
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        factor = min(1.0, clip_norm / (norm.item() + 1e-6))
        for name, gradient in gradients.items():
            momenta[name] = 0.5 * momenta[name] + factor * gradient
            model[name] = model[name] - 0.3 * momenta[name]
        losses.append(loss.item())
    return losses, model


def shard_of(name, tensor, rank, mesh):
    """What one rank must have of a parameter; None if it is another stage's."""
    pp, dp, tp = mesh
    stage, tp_rank = rank // tp // dp, rank % tp
    kind, _, layer = name.partition(".")
    if stage not in ((int(layer) // (LAYERS // pp),) if layer else (0, pp - 1)):
        return None
    if kind not in SPLIT:
        return tensor
    length = tensor.shape[SPLIT[kind]] // tp
    return tensor.narrow(SPLIT[kind], tp_rank * length, length)


def check_mesh(answer, run, world, mesh, clip_norms=(0.5, NEVER), steps=4, num_micro_batches=2):
    """Train on a mesh, with each limit of the norm, and compare with one process."""
    for clip_norm in clip_norms:
        result = run(answer.main, *data(), model_of(world.rank), mesh, steps, clip_norm, num_micro_batches)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise Wrong("type", "main must return losses and parameters", "(list, dict)", show(result))
        case = f"pp {mesh[0]} x dp {mesh[1]} x tp {mesh[2]}, clip_norm {clip_norm:g}, {steps} steps"
        case += f", {num_micro_batches} micro-batches"
        losses, expected = one_process(steps, clip_norm)
        expect("the losses", list(result[0]), losses, tolerance=TOLERANCE, case=case)
        owned = {name: shard_of(name, tensor, world.rank, mesh) for name, tensor in expected.items()}
        owned = {name: tensor for name, tensor in owned.items() if tensor is not None}
        expect("the names of this rank's parameters, sorted", sorted(result[1]), sorted(owned), case=case)
        for name, tensor in owned.items():
            expect(f"{name} after the last step", result[1][name], tensor, tolerance=TOLERANCE, case=case)


@test(points=3, ranks=(1, 2, 4))
def one_stage(answer, world, run):
    """Without pipeline parallelism, losses and parameters are those of one process, with and without clipping."""
    for mesh in {1: ((1, 1, 1),), 2: ((1, 2, 1), (1, 1, 2)), 4: ((1, 2, 2),)}[world.size]:
        check_mesh(answer, run, world, mesh)


@test(points=4, ranks=(2, 4))
def several_stages(answer, world, run):
    """On two and four stages, alone and with another axis, losses and parameters are those of one process."""
    for mesh in {2: ((2, 1, 1),), 4: ((4, 1, 1), (2, 2, 1), (2, 1, 2))}[world.size]:
        check_mesh(answer, run, world, mesh, (0.5,))
    mesh = (2, world.size // 2, 1)
    for num_micro_batches in (1, 3):
        check_mesh(answer, run, world, mesh, (0.25,), 2, num_micro_batches)


@test(points=3, ranks=(8,))
def three_axes(answer, world, run):
    """On pp 2 x dp 2 x tp 2, losses and parameters are those of one process."""
    check_mesh(answer, run, world, (2, 2, 2), (0.5,))


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "once", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
