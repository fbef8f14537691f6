"""Tests of slow_large_batch: the reference is a loop in one process that accumulates in float64."""

from typing import NamedTuple

import torch
from torch import nn

from exercises.observations import PeakMemory
from exercises.testing import Wrong, expect, show, test

BATCH, SAMPLES, RATE = 100, 128, 0.03125
STEPS = 2  # the second batch is a short one
TOLERANCE = 1e-6  # float32 sums of 100 numbers below 1, in any order
KEYS = ("start", "range", "count", "sum", "once", "master")


class Run(NamedTuple):
    """The results of one call of main: the masters, the losses, and the messages sent."""

    masters: list
    losses: list
    records: list


RUNS = []  # several tests use the same run


def model_of(seed):
    """Return a network whose parameters are multiples of 1/8 plus 2**-12; they depend on the seed."""
    model, generator = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randint(1, 9, parameter.shape, generator=generator)
            parameter.copy_(whole / 8 + 2.0**-12)  # bfloat16 loses the last bit, a master keeps it
    return model


def data():
    """Return inputs between 0 and 1, so that the gradients of all samples have equal signs."""
    inputs = torch.randint(0, 17, (SAMPLES, 10), generator=torch.Generator().manual_seed(7)) / 16
    return inputs, inputs.sum(dim=1, keepdim=True) / 4


def trained(answer, world, run):
    """Return the run of main for one epoch, from different initial values on every rank."""
    if not RUNS:
        result = run(answer.main, *data(), model_of(world.rank), epochs=1, batch_size=BATCH, lr=RATE)
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
    """Return (masters, losses) of one process that starts from rank 0's values."""
    (inputs, targets), model = data(), model_of(0)
    masters, losses = [parameter.detach().double() for parameter in model.parameters()], []
    model.bfloat16()
    for first in range(0, SAMPLES, BATCH):
        batch = list(zip(inputs[first : first + BATCH], targets[first : first + BATCH], strict=True))
        sums, loss_of_batch = [torch.zeros_like(master) for master in masters], 0.0
        for x, target in batch:
            loss = (model(x.bfloat16()).float() - target).square().sum() / len(batch)
            for total, gradient in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total += gradient
            loss_of_batch += loss.item()
        for master, total, parameter in zip(masters, sums, model.parameters(), strict=True):
            master -= RATE * total
            parameter.data.copy_(master.float())
        losses.append(loss_of_batch)
    return [master.tolist() for master in masters], losses


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """Masters and losses equal those of one process that accumulates in float64."""
    got, (masters, losses) = trained(answer, world, run), one_process()
    for number, (master, expected) in enumerate(zip(got.masters, masters, strict=True)):
        expect(f"the master of parameter {number}", master, expected, tolerance=TOLERANCE, case="main(...)")
    total = [sum(each) for each in zip(*run.gather(got.losses), strict=True)]
    expect("the losses summed over all ranks", total, losses, tolerance=TOLERANCE, case="main(...)")


@test(points=3)
def every_sample_counts_equally(answer, world, run):
    """Of equal samples, each contributes equally to the sum, however many there are."""
    for samples in (256, 512):
        model = nn.Linear(10, 1, bias=False)
        nn.init.zeros_(model.weight)
        # Each sample contributes -2 / samples to every element.
        result = run(answer.main, torch.ones(samples, 10), torch.ones(samples, 1), model, 1, samples, 0.5)
        expect("the masters after a step of 0.5", _checked(result)[0], [[[1.0] * 10]], case=f"{samples} equal samples")


@test(points=2, ranks=(2,))
def sends_each_gradient_once(answer, world, run):
    """After the start, each gradient is all-reduced once per step, in float32, and nothing else is sent."""
    sent = [record for record in trained(answer, world, run).records if record.name != "broadcast"]
    called = sorted({(record.name, str(record.dtype)) for record in sent})
    expect("operations and dtypes after the start", called, [("all_reduce", "torch.float32")], case="main(...)")
    payload = sum(4 * parameter.numel() for parameter in model_of(0).parameters())
    got = sum(record.payload_bytes for record in sent) / STEPS
    expect("bytes reduced per step", got, payload, case=f"{STEPS} steps")


@test(points=1)
def memory_does_not_grow(answer, run):
    """A step with 40 micro-batches needs no more memory than one with 8."""
    peaks = []
    for samples in (8, 8, 40):  # the first run also allocates what persists
        with PeakMemory() as memory:
            model = nn.Sequential(nn.Linear(10, 2000), nn.ReLU(), nn.Linear(2000, 1))
            _checked(run(answer.main, torch.ones(samples, 10), torch.ones(samples, 1), model, 1, samples, 0.0))
        peaks.append(memory.peak_bytes // 1000)
    what = f"at most 50 kB more for 40 micro-batches, not {peaks[2]} kB instead of {peaks[1]}"
    expect(what, peaks[2] - peaks[1] <= 50, True, case="main(...) with 24,001 parameters")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    given = answer.INVARIANT
    if not given:
        raise Wrong("unwritten", "INVARIANT names no rule yet: give a key of INVARIANTS")
    if given not in KEYS:
        raise Wrong("wrong", "INVARIANT is not a key of INVARIANTS", f"one of {', '.join(KEYS)}", show(given))
    if given != "sum":
        raise Wrong("wrong", "the program obeys this rule; INVARIANT must name the one it violates", got=show(given))


@test(points=2)
def names_the_line(answer, fault):
    """LINE is the line that violates it, in the original file."""
    given, (number, text) = answer.LINE, fault
    if not given:
        raise Wrong("unwritten", "LINE names no line yet: give its number in the original file, or its text")
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise Wrong("type", "LINE must be the number of a line or its text", "an int or a str", show(given))
    if str(given).strip() not in (str(number), text):
        raise Wrong("wrong", "the fault is not in this line of the original file", got=show(given))
