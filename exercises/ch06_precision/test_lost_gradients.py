"""Tests of lost_gradients: the reference is a loop on one process that adds up in float64."""

from typing import NamedTuple

import torch
from torch import nn

from exercises.observed import PeakMemory
from exercises.testing import Wrong, expect, show, test

BATCH, SAMPLES, RATE = 100, 128, 0.03125
STEPS = 2  # the second batch is a short one
TOLERANCE = 1e-6  # float32 sums of 100 numbers below 1, in any order
KEYS = ("start", "count", "sum", "once", "master")


class Run(NamedTuple):
    """What one call of main has left: the masters, the losses, and what was sent."""

    masters: list
    losses: list
    records: list


RUNS = []  # several tests look at one and the same run


def model_of(seed):
    """A network of eighths and sixteenths, which differs by seed."""
    model, generator = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randint(1, 9, parameter.shape, generator=generator)
            parameter.copy_(whole / 8 + 2.0**-12)  # the last bit is lost in bfloat16, and not in a master
    return model


def data():
    """Inputs between 0 and 1, so that all samples pull into one direction."""
    inputs = torch.randint(0, 17, (SAMPLES, 10), generator=torch.Generator().manual_seed(7)) / 16
    return inputs, inputs.sum(dim=1, keepdim=True) / 4


def trained(answer, world, run):
    """The run of main for an epoch, from other starting values on every rank."""
    if not RUNS:
        result = run(answer.main, *data(), model_of(world.rank), epochs=1, batch_size=BATCH, lr=RATE)
        RUNS.append(Run(*_checked(result), run.records))
    return RUNS[0]


def _checked(result):
    """The masters and the losses as lists."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], list):
        raise Wrong("type", "main must return the masters and the losses", "(masters, losses)", show(result))
    for master in result[0]:
        expect("the format of the masters", str(master.dtype), "torch.float32", case="main(...)")
    return [master.tolist() for master in result[0]], list(result[1])


def one_process():
    """(masters, losses) of a single process that starts as rank 0 does."""
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
    """The masters are those of a single process that adds up in float64, and the losses are its losses."""
    got, (masters, losses) = trained(answer, world, run), one_process()
    for number, (master, expected) in enumerate(zip(got.masters, masters, strict=True)):
        expect(f"the master of parameter {number}", master, expected, tolerance=TOLERANCE, case="main(...)")
    total = [sum(each) for each in zip(*run.gather(got.losses), strict=True)]
    expect("the losses of all ranks, added up", total, losses, tolerance=TOLERANCE, case="main(...)")


@test(points=3)
def every_sample_counts_as_the_first(answer, world, run):
    """Of samples that are all alike, twice as many contributions make a sum twice as large."""
    for samples in (256, 512):
        model = nn.Linear(10, 1, bias=False)
        nn.init.zeros_(model.weight)
        # Each sample contributes -2 / samples to every element.
        result = run(answer.main, torch.ones(samples, 10), torch.ones(samples, 1), model, 1, samples, 0.5)
        expect("the masters after a step of 0.5", _checked(result)[0], [[[1.0] * 10]], case=f"{samples} samples alike")


@test(points=2, ranks=(2,))
def nothing_more_is_sent(answer, world, run):
    """Each gradient is summed over ranks once per step, in float32, and nothing else is sent after the start."""
    sent = [record for record in trained(answer, world, run).records if record.name != "broadcast"]
    called = sorted({(record.name, str(record.dtype)) for record in sent})
    expect(
        "what is called after the start, in which dtype", called, [("all_reduce", "torch.float32")], case="main(...)"
    )
    payload = sum(4 * parameter.numel() for parameter in model_of(0).parameters())
    got = sum(record.payload_bytes for record in sent) / STEPS
    expect("bytes reduced per step", got, payload, case=f"{STEPS} steps")


@test(points=1)
def memory_does_not_grow(answer, run):
    """A step takes no more memory for 40 micro-batches than for 8."""
    peaks = []
    for samples in (8, 8, 40):  # the first run makes what stays
        with PeakMemory() as memory:
            model = nn.Sequential(nn.Linear(10, 2000), nn.ReLU(), nn.Linear(2000, 1))
            _checked(run(answer.main, torch.ones(samples, 10), torch.ones(samples, 1), model, 1, samples, 0.0))
        peaks.append(memory.peak_bytes // 1000)
    what = f"at most 50 kB more for 40 micro-batches, not {peaks[2]} kB in place of {peaks[1]}"
    expect(what, peaks[2] - peaks[1] <= 50, True, case="main(...) with 24,001 parameters")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the program breaks as you got it."""
    given = answer.INVARIANT
    if not given:
        raise Wrong("unwritten", "INVARIANT names no rule yet: give a key of INVARIANTS")
    if given not in KEYS:
        raise Wrong("wrong", "INVARIANT is no key of INVARIANTS", f"one of {', '.join(KEYS)}", show(given))
    if given != "sum":
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
