"""Tests of fast_pipeline: the reference is a loop on one process, in float64."""

from typing import NamedTuple

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

BATCH, EPOCHS, PARTS = 12, 1, 4
OTHER_BATCH, OTHER_PARTS = 6, 3
STEPS = EPOCHS * 2
TOLERANCE = 1e-9  # float64 sums in another order, through two steps of AdamW
KEYS = ("cut", "order", "sum", "mean", "norm")


class Run(NamedTuple):
    """The results of one call of main on this rank."""

    parameters: list
    losses: list
    norms: list
    records: list


RUNS: dict[tuple[int, int], Run] = {}  # by batch size and number of micro-batches: several tests use one run


def layers_of():
    """Return layers that are equal on all ranks; their number is not divisible by 2 or 3."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [nn.Sequential(nn.Linear(10, 10), nn.Tanh()).double() for _ in range(5)]


def data():
    """24 samples: two batches."""
    inputs = torch.randn(2 * BATCH, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.flip(1).sin()


def trained(answer, run, batch=BATCH, parts=PARTS):
    """Run main on this rank with `parts` micro-batches in a batch, or return the stored run."""
    if (batch, parts) not in RUNS:
        result = run(answer.main, *data(), layers_of(), epochs=EPOCHS, batch_size=batch, micro_batches=parts)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
            raise Wrong("type", "main must return the stage, the losses and the norms", "(stage, losses, norms)",
                        show(result))  # fmt: skip
        stage, losses, norms = result
        RUNS[batch, parts] = Run([parameter.tolist() for parameter in stage.parameters()], losses, norms, run.records)
    return RUNS[batch, parts]


def one_process(batch=BATCH):
    """(parameters, losses, gradient norms) of a single process without micro-batches."""
    model, (inputs, targets) = nn.Sequential(*layers_of()), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(EPOCHS):
        for first in range(0, len(inputs), batch):
            optimizer.zero_grad()
            error = model(inputs[first : first + batch]) - targets[first : first + batch]
            loss = (error**2).mean()
            loss.backward()
            losses.append(loss.item())
            norms.append(sum((parameter.grad**2).sum().item() for parameter in model.parameters()) ** 0.5)
            optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()], losses, norms


@test(points=4, ranks=(1, 3))
def gradient_norm_is_that_of_one_process(answer, run):
    """In every step the gradient norm equals that of a single process on the full batch."""
    for batch, parts in ((BATCH, PARTS), (OTHER_BATCH, OTHER_PARTS)):
        got, (_, _, norms) = trained(answer, run, batch, parts).norms, one_process(batch)
        case = f"main(..., batch_size={batch}, micro_batches={parts})"
        expect("the gradient norms", got, norms, tolerance=TOLERANCE, case=case)


@test(points=4, ranks=(3,))
def equals_one_process(answer, world, run):
    """The stages together equal the model that a single process trains."""
    stages = run.gather(trained(answer, run).parameters)
    got = [parameter for stage in stages for parameter in stage]
    expect("the parameters of all stages", got, one_process()[0], tolerance=TOLERANCE, case="main(...)")
    expect("stages without a layer", [rank for rank, stage in enumerate(stages) if not stage], [], case="main(...)")


@test(points=2, ranks=(3,))
def losses_are_those_of_one_process(answer, world, run):
    """The last rank has the losses of a single process, the others have 0 for every step."""
    for batch, parts in ((BATCH, PARTS), (OTHER_BATCH, OTHER_PARTS)):
        got, (_, losses, _) = trained(answer, run, batch, parts).losses, one_process(batch)
        if world.rank < world.size - 1:
            losses = [0.0] * len(losses)
        case = f"main(..., batch_size={batch}, micro_batches={parts})"
        expect("the losses", got, losses, tolerance=TOLERANCE, case=case)


@test(points=3, ranks=(3,))
def one_message_per_micro_batch(answer, world, run):
    """In every step a stage sends each neighbour one message per micro-batch: its activations or gradients."""
    records = trained(answer, run).records
    sends = [(record.peer, record.payload_bytes // 8) for record in records if record.name == "send"]
    neighbours = [rank for rank in (world.rank - 1, world.rank + 1) if 0 <= rank < world.size]
    expected = sorted((rank, BATCH // PARTS * 10) for rank in neighbours for _ in range(PARTS * STEPS))
    expect("messages (receiver, elements)", len(sends), len(expected), case="main(...)")
    expect("messages (receiver, elements)", sorted(sends), expected, case="main(...)")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "mean", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
