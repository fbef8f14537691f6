"""Tests of sharded_nothing: numbers against a loop on one process, in float64; memory against what a shard takes."""

import itertools
import tracemalloc
from typing import NamedTuple

import torch
from torch import nn

from exercises.observations import LiveTensorMemory
from exercises.testing import Wrong, expect, show, test

BATCH, EPOCHS = 12, 1
STEPS = EPOCHS * 2
TOLERANCE = 1e-9  # float64 sums in another order, through two steps of Adam
KIB = 1024
KEYS = ("start", "row", "mean", "states", "whole")
SMALL, LARGE = 20, 20_000  # of the hidden layer: 241 parameters, for 2 and 3 ranks one too many; and 240001


class Run(NamedTuple):
    """What one call of main has left: the parameters in one row, and what was sent."""

    row: torch.Tensor
    records: list


RUNS = []  # several tests look at one and the same run


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
    """The run of main from other starting values on every rank."""
    if not RUNS:
        result = run(answer.main, *data(), model_of(SMALL, world.rank), epochs=EPOCHS, batch_size=BATCH)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
            raise Wrong("type", "main must return three things", "(model, losses, bytes of states)", show(result))
        row = torch.cat([parameter.detach().flatten() for parameter in result[0].parameters()])
        RUNS.append(Run(row, run.records))
    return RUNS[0]


def one_process():
    """The parameters of a single process that starts as rank 0 does, in one row."""
    model, (inputs, targets) = model_of(SMALL, 0), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    for _ in range(EPOCHS):
        for first in range(0, len(inputs), BATCH):
            optimizer.zero_grad()
            error = model(inputs[first : first + BATCH]) - targets[first : first + BATCH]
            (error**2).mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def kept_bytes(answer, world, run):
    """Bytes that are there when the second step begins, tensors and whatever else Python holds, but not before main."""
    model, seen = model_of(LARGE, world.rank), []
    tracemalloc.start()
    with LiveTensorMemory() as memory:
        watch = model.register_forward_pre_hook(
            lambda *_: seen.append((memory.nbytes(), tracemalloc.get_traced_memory()[0]))
        )
        run(answer.main, *data(), model, epochs=EPOCHS, batch_size=BATCH)
        watch.remove()
    tracemalloc.stop()
    if len(seen) != STEPS:
        raise Wrong("wrong", "how often each rank computes a loss", str(STEPS), str(len(seen)), case="main(...)")
    return sum(seen[1])


@test(points=4, ranks=(2, 4))
def states_are_sharded(answer, world, run):
    """Of what Adam remembers each rank has its shard: two numbers for each of its elements, and nothing for others."""
    row = 8 * sum(parameter.numel() for parameter in model_of(LARGE, 0).parameters())
    got, shard = kept_bytes(answer, world, run), row / world.size
    most = 2 * row + 4 * shard  # parameters and gradients; two shards of states, one of the gradient, and one to spare
    if got > most:
        case = f"parameters of {row // KIB} KiB, {world.size} ranks"
        wanted = f"at most {most // KIB:.0f}: {2 * row // KIB} of parameters and gradients, and shards"
        raise Wrong("wrong", "KiB that a rank keeps between two steps", wanted, f"{got // KIB}", case=case)


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """The trained model is the one of a single process, on every rank, whatever their number."""
    got = trained(answer, world, run).row
    expect("the parameters after training, in one row", got, one_process(), tolerance=TOLERANCE, case="main(...)")


@test(points=3, ranks=(2, 3))
def no_more_bytes_than_an_all_reduce(answer, world, run):
    """A step sends what an all-reduce of the gradients would send, and no more."""
    records = trained(answer, world, run).records
    steps = list(itertools.dropwhile(lambda record: record.name == "broadcast", records))  # all start alike
    sent = sum(run.gather(sum(record.wire_bytes for record in steps))) / STEPS
    elements = one_process().numel()
    padded = -(-elements // world.size) * world.size
    least, most = (2 * (world.size - 1) * numel * 8 for numel in (elements, padded))
    if not least <= sent <= most:
        between = f"{least} to {most}: (ranks - 1) rows for a reduce-scatter, as many for an all-gather"
        raise Wrong("wrong", "bytes that all ranks send in a step", between, f"{sent:.0f}", case="main(...)")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the program breaks as you got it."""
    given = answer.INVARIANT
    if not given:
        raise Wrong("unwritten", "INVARIANT names no rule yet: give a key of INVARIANTS")
    if given not in KEYS:
        raise Wrong("wrong", "INVARIANT is no key of INVARIANTS", f"one of {', '.join(KEYS)}", show(given))
    if given != "states":
        raise Wrong("wrong", "the program keeps this rule; INVARIANT must name the one it breaks", got=show(given))


@test(points=2)
def names_the_line(answer, fault):
    """LINE is the line that breaks it, in the file as you got it."""
    given, (number, text) = answer.LINE, fault
    if not given:
        raise Wrong("unwritten", "LINE names no line yet: give its number in the file as you got it, or its text")
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise Wrong("type", "LINE must be the number of a line or its text", "a number or a text", show(given))
    if str(given).strip() not in (str(number), text):
        raise Wrong("wrong", "the fault is not in this line of the file as you got it", got=show(given))
