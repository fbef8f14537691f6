"""Tests of unsaved_memory: numbers against a loop on one process, in float64; memory against what a shard takes."""

import itertools
from typing import NamedTuple

import torch
from torch import nn

from exercises.observations import LiveTensorMemory, PythonMemory
from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

BATCH, EPOCHS = 12, 1
STEPS = EPOCHS * 2
TOLERANCE = 1e-9  # float64 sums in another order, through two steps of Adam
KIB = 1024
KEYS = ("start", "shards", "mean", "states", "whole")
SMALL, LARGE = 20, 20_000  # of the hidden layer: 241 parameters, for 2 and 3 ranks one too many; and 240001


class Run(NamedTuple):
    """The results of one call of main: the parameters as one flat tensor, and the recorded messages.

    is_given: whether the model is the one that main was given.
    """

    parameters: torch.Tensor
    is_given: bool
    losses: list
    state_bytes: int
    records: list


RUNS = []  # several tests use one run


def model_of(hidden, seed):
    """A network in float64 that differs by seed."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def data():
    """24 samples: two batches."""
    inputs = torch.randn(2 * BATCH, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def trained(answer, world, run):
    """Run main, which starts with other values on every rank, or return the stored run."""
    if not RUNS:
        model = model_of(SMALL, world.rank)
        result = run(answer.main, *data(), model, epochs=EPOCHS, batch_size=BATCH)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
            raise Wrong(
                "type",
                "main must return the model, the losses and the bytes of Adam's states",
                "(model, losses, bytes of states)",
                show(result),
            )
        flat = torch.cat([parameter.detach().flatten() for parameter in result[0].parameters()])
        RUNS.append(Run(flat, result[0] is model, list(result[1]), result[2], run.records))
    return RUNS[0]


def one_process():
    """The parameters of a single process that starts as rank 0 does, as one flat tensor, and its losses."""
    model, losses, (inputs, targets) = model_of(SMALL, 0), [], data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    for _ in range(EPOCHS):
        for first in range(0, len(inputs), BATCH):
            optimizer.zero_grad()
            error = model(inputs[first : first + BATCH]) - targets[first : first + BATCH]
            loss = (error**2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), losses


def kept_bytes(answer, world, run):
    """Return the bytes allocated since the call of main, by tensors and by Python, when the second step begins."""
    model, seen = model_of(LARGE, world.rank), []
    with PythonMemory() as python, LiveTensorMemory() as tensors:
        watch = model.register_forward_pre_hook(lambda *_: seen.append(tensors.nbytes() + python.nbytes()))
        run(answer.main, *data(), model, epochs=EPOCHS, batch_size=BATCH)
        watch.remove()
    if len(seen) != STEPS:
        raise Wrong("wrong", "losses that each rank computes", str(STEPS), str(len(seen)), case="main(...)")
    return seen[1]


@test(points=4, ranks=(3, 4))
def states_are_sharded(answer, world, run):
    """Each rank stores Adam's states of its own shard only: two numbers per element."""
    flat = 8 * sum(parameter.numel() for parameter in model_of(LARGE, 0).parameters())
    got, shard = kept_bytes(answer, world, run), flat / world.size
    # Parameters and gradients; two shards of states, one of the gradient, one or two of copies and messages.
    most = 2 * flat + 5.5 * shard
    if got > most:
        case = f"parameters of {flat // KIB} KiB, {world.size} ranks"
        wanted = f"at most {most // KIB:.0f}: {2 * flat // KIB} of parameters and gradients, and shards"
        raise Wrong("wrong", "KiB that a rank stores between two steps", wanted, f"{got // KIB}", case=case)


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """The trained model is the one of a single process, on every rank; main also returns losses and bytes of states."""
    got, (parameters, losses) = trained(answer, world, run), one_process()
    expect("the parameters after training, flat", got.parameters, parameters, tolerance=TOLERANCE, case="main(...)")
    expect("whether the returned model is the given one", got.is_given, True, case="main(...)")
    mean = [sum(each) / world.size for each in zip(*run.gather(got.losses), strict=True)]
    expect("the mean over the ranks of the loss at each step", mean, losses, tolerance=TOLERANCE, case="main(...)")
    shard = -(-len(parameters) // world.size)
    padded = 2 * 8 * shard * world.size
    states = run.gather(got.state_bytes)
    if not 2 * 8 * len(parameters) <= sum(states) <= padded or max(states) > 2 * 8 * shard:
        wanted = f"{2 * 8 * shard} per rank, or less by its padding: two float64 per element of its shard"
        raise Wrong(
            "wrong", "the bytes of each rank's Adam states that main returns", wanted, show(states), "main(...)"
        )


@test(points=3, ranks=(2, 3))
def no_more_bytes_than_an_all_reduce(answer, world, run):
    """A step sends what an all-reduce of the gradients would send, and no more."""
    records = trained(answer, world, run).records
    steps = list(itertools.dropwhile(lambda record: record.name == "broadcast", records))  # all start alike
    sent = sum(run.gather(sum(record.wire_bytes for record in steps))) / STEPS
    elements = one_process()[0].numel()
    padded = -(-elements // world.size) * world.size
    least, most = (2 * (world.size - 1) * numel * 8 for numel in (elements, padded))
    if not least <= sent <= most:
        between = f"{least} to {most}: (ranks - 1) x parameters for a reduce-scatter, as many for an all-gather"
        raise Wrong("wrong", "bytes that all ranks send in a step", between, f"{sent:.0f}", case="main(...)")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "states", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
