"""Tests of scale_dependent_run: the reference is a loop in one process that sums and updates in float64."""

import math
from typing import NamedTuple

import torch
from torch import nn

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

SAMPLES, STEPS, RATE = 11, 16, 0.0390625  # 11 samples: uneven on 2 and on 3 ranks
SCALE, GROWTH_INTERVAL = 2.0**22, 2  # steps are skipped at the start, and again whenever the scale has grown too far
TOLERANCE = 1e-5  # float32 updates of 0.03, rounded a few times
KEYS = ("start", "scale", "sum", "agree", "state", "master")


class Run(NamedTuple):
    """The results of one call of main: the masters, the losses, and the messages sent."""

    masters: list
    losses: list
    records: list


RUNS = []  # several tests use the same run


def model_of(seed):
    """Return a network whose parameters are multiples of 1/32 plus 2**-16; they depend on the seed."""
    model, generator = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randint(1, 9, parameter.shape, generator=generator)
            parameter.copy_(whole / 32 + 2.0**-16)  # float16 loses the last bit, a master keeps it
    return model


def data():
    """Return inputs and targets; the gradient's norm is 2.6 at first and then 0.3, so that some steps are clipped."""
    inputs = torch.randint(1, 17, (SAMPLES, 10), generator=torch.Generator().manual_seed(7)) / 16
    return inputs, inputs.sum(dim=1, keepdim=True) / 4


def trained(answer, world, run):
    """Return the run of main from different initial values on every rank."""
    if not RUNS:
        result = run(answer.main, *data(), model_of(world.rank), STEPS, SCALE, GROWTH_INTERVAL, RATE)
        RUNS.append(Run(*_checked(result), run.records))
    return RUNS[0]


def _checked(result):
    """Return the masters and the losses as lists."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], list):
        raise Wrong("type", "main must return the masters and the losses", "(masters, losses)", show(result))
    for master in result[0]:
        expect("the dtype of the masters", str(master.dtype), "torch.float32", case="main(...)")
    return [master.tolist() for master in result[0]], list(result[1])


def one_process():
    """Return (masters, losses, which steps are skipped) of one process that starts from rank 0's values."""
    (inputs, targets), model = data(), model_of(0)
    masters = [parameter.detach().double() for parameter in model.parameters()]
    model.half()
    means, mean_squares = [0.0 for _ in masters], [0.0 for _ in masters]
    losses, skipped, scale = [], [], SCALE
    for _ in range(STEPS):
        sums, loss_of_step = [torch.zeros_like(master) for master in masters], 0.0
        for x, target in zip(inputs, targets, strict=True):
            loss = (model(x.half()).float() - target).square().sum() / SAMPLES
            for total, gradient in zip(sums, torch.autograd.grad(loss * scale, list(model.parameters())), strict=True):
                total += gradient
            loss_of_step += loss.item()
        losses.append(loss_of_step)
        norm = math.sqrt(sum(total.square().sum().item() for total in sums)) / scale
        skipped.append(not math.isfinite(norm))
        if skipped[-1]:
            scale /= 2
            continue
        updates = skipped.count(False)
        for number, (master, total, parameter) in enumerate(zip(masters, sums, model.parameters(), strict=True)):
            gradient = total / scale / max(norm, 1.0)
            means[number] = 0.9 * means[number] + 0.1 * gradient
            mean_squares[number] = 0.999 * mean_squares[number] + 0.001 * gradient.square()
            root = (mean_squares[number] / (1 - 0.999**updates)).sqrt()
            master -= RATE * means[number] / (1 - 0.9**updates) / (root + 1e-8)
            parameter.data.copy_(master.float())
        if _good_run(skipped) % GROWTH_INTERVAL == 0:
            scale *= 2
    return [master.tolist() for master in masters], losses, skipped


def _good_run(skipped):
    """Return the number of steps since the last skipped one."""
    return [*reversed(skipped), True].index(True)


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """Masters and losses equal those of one process that sums and updates in float64."""
    got, (masters, losses, _) = trained(answer, world, run), one_process()
    case = f"{STEPS} steps from a scale of 2**22, which doubles after {GROWTH_INTERVAL} good steps"
    for number, (master, expected) in enumerate(zip(got.masters, masters, strict=True)):
        expect(f"the master of parameter {number}", master, expected, tolerance=TOLERANCE, case=case)
    total = [sum(each) for each in zip(*run.gather(got.losses), strict=True)]
    expect("the losses summed over all ranks", total, losses, tolerance=1e-4, case=case)


@test(points=4)
def first_update_is_full(answer, run):
    """Adam's first update has the size of the learning rate, however many steps were skipped before it."""
    for skipped in (0, 1, 4, 16):
        model = nn.Linear(10, 1, bias=False)
        nn.init.zeros_(model.weight)
        # Two equal samples: the gradient of each output is the scale itself, and float16 ends below 2**16.
        result = run(
            answer.main, torch.ones(2, 10), -torch.ones(2, 1), model, skipped + 1, 2.0 ** (15 + skipped), 99, 0.5
        )
        got = [[round(value, 4) for value in row] for row in _checked(result)[0][0]]
        expect("the master after a first update of 0.5", got, [[-0.5] * 10], case=f"steps skipped before it: {skipped}")


@test(points=2, ranks=(2,))
def sends_each_gradient_once(answer, world, run):
    """After the start, each gradient is all-reduced once per step, in float32, and nothing else is sent."""
    sent = [record for record in trained(answer, world, run).records if record.name != "broadcast"]
    called = sorted({(record.name, str(record.dtype)) for record in sent})
    expect("operations and dtypes after the start", called, [("all_reduce", "torch.float32")], case="main(...)")
    payload = sum(4 * parameter.numel() for parameter in model_of(0).parameters())
    got = sum(record.payload_bytes for record in sent) / STEPS
    expect("bytes reduced per step", got, payload, case=f"{STEPS} steps")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "state", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
