"""Tests of resume_that_is_another_run: the reference is a loop in one process, in float64, that is never stopped."""

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, load_again, show, test

SAMPLES, BATCH, SEED = 22, 4, 3  # five batches per epoch; two samples are left over
TOLERANCE = 2e-5  # float32 sums in another order, over a few steps
KEYS = ("start", "moments", "rate", "order", "sum")


def data():
    """Samples that all differ, with targets that a small network cannot reach."""
    inputs = torch.randint(0, 17, (SAMPLES, 10), generator=torch.Generator().manual_seed(7)) / 16
    return inputs, inputs.square().mean(dim=1, keepdim=True) + torch.arange(SAMPLES)[:, None] / SAMPLES


def model_of(seed):
    model, generator = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=generator) / 16)
    return model


def one_process(steps, batch_size=BATCH, seed=SEED):
    """The losses and the last parameters of the run without a stop, from rank 0's values."""
    (inputs, targets), model = data(), model_of(0).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-3, foreach=False)
    losses, per_epoch = [], SAMPLES // batch_size
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step // per_epoch)
        order = torch.randperm(SAMPLES, generator=generator)
        batch = order[step % per_epoch * batch_size :][:batch_size]
        loss = (model(inputs[batch].double()) - targets[batch]).square().sum() / batch_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (step + 1) / 4)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def train(answer, run, model, steps, checkpoint=None, batch_size=BATCH, seed=SEED):
    main = answer.main if checkpoint is None else load_again(answer).main  # new processes resume
    result = run(main, *data(), model, steps, checkpoint, batch_size, seed)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], bytes):
        raise Wrong("type", "main must return a checkpoint and the losses", "(bytes, list)", show(result))
    return result[0], list(result[1])


def compare(losses, model, steps, first, case, batch_size=BATCH, seed=SEED):
    expected, parameters = one_process(steps, batch_size, seed)
    expect(f"the losses from step {first + 1} on", losses, expected[first:], tolerance=TOLERANCE, case=case)
    for number, (got, wanted) in enumerate(zip(model.parameters(), parameters, strict=True)):
        expect(f"parameter {number} after step {steps}", got.detach(), wanted, tolerance=TOLERANCE, case=case)


@test(points=2, ranks=(1, 2, 3))
def without_a_stop(answer, world, run):
    """Without a stop, losses and parameters are those of one process."""
    model = model_of(world.rank)
    _, losses = train(answer, run, model, 12)
    compare(losses, model, 12, 0, "12 steps without a stop")


@test(points=5, ranks=(1, 2))
def resumed_run_is_the_same_run(answer, world, run):
    """A resumed run goes on with the losses and the parameters of the run without a stop."""
    for stop in (3, 5, 8, 10):
        checkpoint, _ = train(answer, run, model_of(world.rank), stop)
        model = model_of(100 + world.rank)
        _, losses = train(answer, run, model, 14, checkpoint)
        compare(losses, model, 14, stop, f"stopped after step {stop}, resumed until step 14")
    for stop, batch_size, seed in ((4, 7, 8), (9, 6, 0)):
        checkpoint, _ = train(answer, run, model_of(world.rank), stop, None, batch_size, seed)
        model = model_of(100 + world.rank)
        _, losses = train(answer, run, model, 10, checkpoint, batch_size, seed)
        case = f"batch_size {batch_size}, seed {seed}, stopped after step {stop}, resumed until step 10"
        compare(losses, model, 10, stop, case, batch_size, seed)


@test(points=3, ranks=(1, 2))
def resumed_twice(answer, world, run):
    """Each resumed run can be stopped and resumed again."""
    checkpoint = None
    for number, until in enumerate((4, 7, 13, 16)):
        model = model_of(100 * number + world.rank)
        checkpoint, losses = train(answer, run, model, until, checkpoint)
        first = (0, 4, 7, 13)[number]
        compare(losses, model, until, first, f"stopped after steps 4, 7 and 13; the part until step {until}")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "order", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
