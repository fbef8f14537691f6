"""Tests of falling_loss: the reference is a loop on one process, in float64."""

from typing import NamedTuple

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

BATCH, EPOCHS = 12, 2
STEPS = EPOCHS * 2
TOLERANCE = 1e-9  # float64 sums in another order, through four steps of Adam
KEYS = ("start", "share", "mean", "gradient", "steps")


class Run(NamedTuple):
    """The results of one call of main: parameters, losses, recorded messages, and the number of samples forwarded."""

    parameters: list
    losses: list
    records: list
    samples: int


RUNS = []  # several tests use one run


def model_of(seed):
    """A network in float64 that differs by seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)).double()


def data():
    """24 samples: two batches."""
    inputs = torch.randn(2 * BATCH, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def trained(answer, world, run):
    """Run main from initial values that differ by rank, or return the stored run."""
    if not RUNS:
        model, samples = model_of(world.rank), []
        model.register_forward_pre_hook(lambda _, args: samples.append(len(args[0])))
        result = run(answer.main, *data(), model, epochs=EPOCHS, batch_size=BATCH)
        returned = tuple(map(type, result)) if isinstance(result, tuple) else ()
        if len(returned) != 2 or not issubclass(returned[0], nn.Module) or returned[1] is not list:
            raise Wrong("type", "main must return the model and the losses", "(model, losses)", show(result))
        parameters = [parameter.tolist() for parameter in result[0].parameters()]
        RUNS.append(Run(parameters, result[1], run.records, sum(samples)))
    return RUNS[0]


def one_process():
    """Return the parameters and the losses of a single process that starts with the parameters of rank 0."""
    model, (inputs, targets), losses = model_of(0), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    for _ in range(EPOCHS):
        for first in range(0, len(inputs), BATCH):
            optimizer.zero_grad()
            error = model(inputs[first : first + BATCH]) - targets[first : first + BATCH]
            (error**2).mean().backward()
            optimizer.step()
            losses.append((error**2).mean().item())
    return [parameter.tolist() for parameter in model.parameters()], losses


@test(points=3, ranks=(2, 4))
def replicas_stay_equal(answer, world, run):
    """After training, the parameters of all replicas are equal."""
    everywhere = run.gather(trained(answer, world, run).parameters)
    for rank, parameters in enumerate(everywhere):
        expect(f"the parameters of rank {rank} and of rank 0", parameters, everywhere[0], case="main(...)")


@test(points=4, ranks=(1, 2, 4))
def equals_one_process(answer, world, run):
    """The trained model equals that of a single process, and the losses are those of each rank's samples."""
    got, (parameters, losses) = trained(answer, world, run), one_process()
    expect("the parameters after training", got.parameters, parameters, tolerance=TOLERANCE, case="main(...)")
    numbers = [float(loss) for loss in got.losses]
    expect("the number of losses, one per step", len(numbers), STEPS, case="main(...)")
    means = [sum(each) / world.size for each in zip(*run.gather(numbers), strict=True)]
    expect("the losses of each step, averaged over the ranks", means, losses, tolerance=TOLERANCE, case="main(...)")


@test(points=2, ranks=(2,))
def sends_only_gradients(answer, world, run):
    """Each gradient is all-reduced once per step, and nothing else is sent after the start."""
    names = [record.name for record in trained(answer, world, run).records]
    later = names[names.index("all_reduce") :] if "all_reduce" in names else []
    expect("operations after the first gradient", sorted(set(later)), ["all_reduce"], case="main(...)")
    sent = [record for record in trained(answer, world, run).records if record.name != "broadcast"]
    expect("operations after the start", sorted({record.name for record in sent}), ["all_reduce"], case="main(...)")
    payload = sum(parameter.numel() * 8 for parameter in model_of(0).parameters())
    got = sum(record.payload_bytes for record in sent) / STEPS
    expect("bytes reduced per step", got, payload, case=f"{STEPS} steps")
    share = STEPS * BATCH // world.size
    expect("samples of which this rank runs forward", trained(answer, world, run).samples, share, case=f"{STEPS} steps")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "gradient", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
