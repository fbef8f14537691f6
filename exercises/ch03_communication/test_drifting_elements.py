"""Tests of drifting_elements: the reference is a loop in one process, in float64."""

from typing import NamedTuple

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

BATCH, EPOCHS = 12, 1
STEPS = EPOCHS * 2
TOLERANCE = 1e-9  # float64 sums in another order, through two steps of Adam
KEYS = ("start", "neighbours", "chunks", "added", "mean", "gathered", "samples", "places")
# Numbers of parameters, and the width of the hidden layer. Divided by 3 ranks, 11 leaves a remainder of two and 241 of
# one; divided by 2 ranks, both leave one.
MODELS = {11: None, 241: 20}


class Run(NamedTuple):
    """The results of one call of main: the trained parameters, the losses, and the messages sent."""

    parameters: list
    losses: list
    records: list


RUNS = {}  # several tests use the same run


def model_of(parameters, seed):
    """Return a float64 network with this number of parameters; its values depend on the seed."""
    hidden, generator = MODELS[parameters], torch.Generator().manual_seed(seed)
    last = nn.Linear(hidden or 10, 1)
    model = (nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), last) if hidden else last).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def data():
    """24 samples: two batches."""
    inputs = torch.randn(2 * BATCH, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def trained(answer, world, run, parameters):
    """Return the run of main with a model of this size, from different initial values on every rank."""
    if parameters not in RUNS:
        model = model_of(parameters, world.rank)
        result = run(answer.main, *data(), model, epochs=EPOCHS, batch_size=BATCH)
        if not isinstance(result, tuple) or not isinstance(result[0], nn.Module):
            raise Wrong("type", "main must return the model and the losses", "(model, losses)", show(result))
        flat = torch.cat([parameter.detach().flatten() for parameter in result[0].parameters()]).tolist()
        RUNS[parameters] = Run(flat, list(result[1]), run.records)
    return RUNS[parameters]


def one_process(parameters):
    """Return the parameters, flattened, and the losses of one process that starts from rank 0's values."""
    model, (inputs, targets), losses = model_of(parameters, 0), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    for _ in range(EPOCHS):
        for first in range(0, len(inputs), BATCH):
            optimizer.zero_grad()
            error = model(inputs[first : first + BATCH]) - targets[first : first + BATCH]
            loss = (error**2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), losses


@test(points=3, ranks=(3,))
def replicas_stay_equal(answer, world, run):
    """After training, the parameters of all replicas are equal, for every number of parameters."""
    for parameters in MODELS:
        everywhere = run.gather(trained(answer, world, run, parameters).parameters)
        for rank, flat in enumerate(everywhere):
            what = f"the parameters of rank {rank} and of rank 0"
            expect(what, flat, everywhere[0], case=f"main(...) with {parameters} parameters")


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """Parameters and mean loss equal those of one process, for every number of parameters."""
    for parameters in MODELS if world.size > 2 else (11,):  # with two ranks both have a remainder of one
        got, case = trained(answer, world, run, parameters), f"main(...) with {parameters} parameters"
        expected, losses = one_process(parameters)
        expect("the parameters after training", got.parameters, expected, tolerance=TOLERANCE, case=case)
        expect("the number of losses, one per step", len(got.losses), STEPS, case=case)
        mean = [sum(each) / world.size for each in zip(*run.gather(got.losses), strict=True)]
        expect("the mean over the ranks of the loss at each step", mean, losses, tolerance=TOLERANCE, case=case)


@test(points=3, ranks=(3,))
def messages_follow_the_ring(answer, world, run):
    """In each step a rank sends 2 (ranks - 1) messages to neighbours, and 2 (ranks - 1) / ranks of the gradients."""
    size, parameters = world.size, 241
    sent = [record for record in trained(answer, world, run, parameters).records if record.name != "broadcast"]
    case = f"main(...) with {parameters} parameters"
    expect("operations called after the start", sorted({record.name for record in sent}), ["recv", "send"], case=case)
    sent = [record for record in sent if record.name == "send"]
    to = {record.peer for record in sent}
    near = {(world.rank + 1) % size, (world.rank - 1) % size}
    expect("ranks sent to that are not neighbours", sorted(to - near), [], case=case)
    expect("messages per step and rank", len(sent) / STEPS, 2 * (size - 1), case=case)
    mine = sum(record.payload_bytes for record in sent) // 8 // STEPS
    elements = sum(run.gather(mine))
    padded = -(-parameters // size) * size  # padding all chunks to one length is correct, too
    if not 2 * parameters * (size - 1) <= elements <= 2 * padded * (size - 1):
        least = f"{2 * parameters * (size - 1)}, or {2 * padded * (size - 1)} with padded chunks"
        raise Wrong("wrong", "elements that all ranks send in a step", least, str(elements), case=case)
    if mine > 2 * (size - 1) * padded // size:
        most = f"at most {2 * (size - 1) * padded // size}: chunks differ by one element"
        raise Wrong("wrong", "elements that this rank sends in a step", most, str(mine), case=case)


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "chunks", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
