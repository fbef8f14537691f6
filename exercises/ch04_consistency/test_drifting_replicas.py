"""Tests of drifting_replicas: the reference is a loop over all replicas in one process, in float64."""

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

H, RATE, MOMENTUM = 3, 0.125, 0.5
COUNTS = {1: (12,), 2: (9, 3), 3: (3, 2, 7)}
TOLERANCE = 2e-5  # float32, over a few steps
KEYS = ("start", "data", "rounds", "share", "merge", "momentum")
NAMES = ("weight of layer 0", "bias of layer 0", "weight of layer 2", "bias of layer 2")


def data():
    """Twelve samples that all differ, with targets that a small network cannot reach."""
    inputs = torch.randint(0, 17, (12, 10), generator=torch.Generator().manual_seed(7)) / 16
    return inputs, inputs.square().mean(dim=1, keepdim=True) + torch.arange(24).view(12, 2) / 24


def model_of(seed, transposed=(), sliced=False):
    """A network; the weights of the layers `transposed` are stored as (inputs, outputs).

    sliced: the weight of layer 2 is every second column of a larger tensor.
    """
    model, generator = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 2)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=generator) / 16)
    for layer in transposed:
        model[layer].weight = nn.Parameter(model[layer].weight.data.t().contiguous().t())
    if sliced:
        model[2].weight = nn.Parameter(model[2].weight.data.repeat_interleave(2, dim=1)[:, ::2])
    return model


def one_process(counts, steps, h=H):
    """The losses, and the parameters of every replica at the end."""
    (inputs, targets), replicas = data(), [model_of(0).double() for _ in counts]
    velocities = [[torch.zeros_like(p) for p in replica.parameters()] for replica in replicas]
    batches, losses = torch.arange(len(inputs)).split(list(counts)), []
    for step in range(steps):
        total = 0.0
        for replica, velocity, batch, count in zip(replicas, velocities, batches, counts, strict=True):
            loss = (replica(inputs[batch].double()) - targets[batch]).square().mean()
            total += count / sum(counts) * loss.item()
            gradients = torch.autograd.grad(loss, list(replica.parameters()))
            for parameter, v, gradient in zip(replica.parameters(), velocity, gradients, strict=True):
                v.copy_(MOMENTUM * v + gradient)
                parameter.data.sub_(RATE * v)
        losses.append(total)
        if (step + 1) % h == 0 or step + 1 == steps:
            for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(n / sum(counts) * p.data for n, p in zip(counts, parameters, strict=True))
                for parameter in parameters:
                    parameter.data.copy_(mean)
    return losses, [parameter.detach() for parameter in replicas[0].parameters()]


def train(answer, world, run, steps, h=H, transposed=(), sliced=False):
    model = model_of(world.rank, transposed, sliced)
    losses = run(answer.main, *data(), model, COUNTS[world.size], steps, h, RATE, MOMENTUM)
    if not isinstance(losses, list):
        raise Wrong("type", "main must return the losses", "a list", show(losses))
    return losses, [parameter.detach() for parameter in model.parameters()]


def compare(answer, world, run, steps, h=H, transposed=(), sliced=False):
    losses, parameters = train(answer, world, run, steps, h, transposed, sliced)
    expected_losses, expected = one_process(COUNTS[world.size], steps, h)
    case = f"{steps} steps, h={h}" + (f", weight of layer {transposed[0]} stored transposed" if transposed else "")
    case += ", weight of layer 2 every second column of a larger tensor" * sliced
    for name, got, wanted in zip(NAMES, parameters, expected, strict=True):
        expect(f"{name} at the end", got, wanted, tolerance=TOLERANCE, case=case)
    expect("the losses", losses, expected_losses, tolerance=TOLERANCE, case=case)


@test(points=2, ranks=(1, 2, 3))
def contiguous_parameters(answer, world, run):
    """With contiguous parameters, losses and parameters are those of one process that trains all replicas."""
    compare(answer, world, run, 7)
    compare(answer, world, run, 6, h=2)


@test(points=5, ranks=(2, 3))
def replicas_are_equal_after_the_last_merge(answer, world, run):
    """With a weight that is stored transposed, all replicas end with the weighted mean in every parameter."""
    for transposed in ((0,), (2,), (0, 2)):
        for steps in (H, 7):
            compare(answer, world, run, steps, transposed=transposed)
    compare(answer, world, run, H, sliced=True)


@test(points=2, ranks=(2,))
def one_message_per_merge(answer, world, run):
    """A merge sends all parameters in one message, and no parameter is sent between two merges."""
    train(answer, world, run, 7, transposed=(0,))
    numel = sum(parameter.numel() for parameter in model_of(0).parameters())
    sent = [(r.name, r.payload_bytes // 4) for r in run.records if r.name != "broadcast" and r.payload_bytes > 16]
    expect("messages of parameters: (operation, elements)", sent, [("all_reduce", numel)] * 3, case="7 steps, h=3")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "merge", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
