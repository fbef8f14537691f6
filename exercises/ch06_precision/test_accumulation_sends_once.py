"""Tests of accumulation_sends_once: the reference is one batch on one process, in float64.

Data and parameters are small whole numbers, and the number of tokens is a power of two: bfloat16 has every gradient of
a micro-batch, float32 every sum of them, and so nothing depends on the order of addition.
"""

import inspect
import linecache
import runpy
from typing import NamedTuple

import torch
from torch import nn

from exercises.testing import Wrong, expect, test

SHAPES = ((3, 4), (2, 3))
NUMEL = sum(rows * columns for rows, columns in SHAPES)


def draw(seed, shape, least=-1, most=1):
    """Whole numbers from `least` to `most`."""
    return torch.randint(least, most + 1, shape, generator=torch.Generator().manual_seed(seed)).double()


def parameters(step):
    """Other ones in every step."""
    return [draw(100 * step + number, shape) for number, shape in enumerate(SHAPES)]


class Batch(NamedTuple):
    """One micro-batch in float64; all its numbers are multiples of `scale`, and its gradients of scale**2."""

    inputs: torch.Tensor
    targets: torch.Tensor


def batch(seed, tokens, scale=1.0):
    return Batch(scale * draw(seed, (tokens, 4)), scale * draw(seed + 1, (tokens, 2), -2, 2))


def uneven(size, seed, empty=()):
    """(ranks, 4) micro-batches of unequal numbers of tokens, all together a power of two; none on the ranks `empty`."""
    tokens = [[(3, 0, 1, 2, 1)[(4 * rank + index) % 5] for index in range(4)] for rank in range(size)]
    tokens = [[0] * 4 if rank in empty else row for rank, row in enumerate(tokens)]
    there, total = [rank for rank in range(size) if rank not in empty], sum(map(sum, tokens))
    extra = (1 << (total - 1).bit_length()) - total if total else 0
    for number in range(extra):
        tokens[there[number % len(there)]][number // len(there) % 4] += 1
    return [[batch(seed + 10 * (4 * r + i), n, 2.0**-i) for i, n in enumerate(row)] for r, row in enumerate(tokens)]


def with_more_tokens(step):
    """Add a micro-batch of zeros: rank 0 gets 301 tokens, a number that bfloat16 does not have, and all ranks 1024."""
    tokens = [sum(len(each.inputs) for each in row) for row in step]
    more = [301 - tokens[0], *(0 for _ in step[2:]), 1024 - 301 - sum(tokens[1:])][: len(step)]
    return [[*row, Batch(torch.zeros(n, 4), torch.zeros(n, 2))] for row, n in zip(step, more, strict=True)]


def without_errors(number, step):
    """Replace the targets by the model's outputs, with the parameters of step `number`: all gradients are zero."""
    w1, w2 = parameters(number)
    return [[Batch(x, torch.relu(x @ w1.T) @ w2.T) for x, _ in row] for row in step]


def one_process(step, micro_batches):
    """The gradients of all these micro-batches in one, (ranks, micro-batches); None when there is no token."""
    every = [each for row in micro_batches for each in row]
    if not every:
        return None
    x, t = (torch.cat(column) for column in zip(*every, strict=True))
    w1, w2 = (parameter.requires_grad_() for parameter in parameters(step))
    loss = ((torch.relu(x @ w1.T) @ w2.T - t) ** 2).sum() / max(len(x), 1)
    return [gradient.tolist() for gradient in torch.autograd.grad(loss, (w1, w2))] if len(x) else None


class Run(NamedTuple):
    """What one call of main has left.

    gradients: as `update` got them, of each step. events: "forward" and "backward" of micro-batches and "update", each
    with the number of messages before it. records: what was sent.
    """

    gradients: list
    events: list
    records: list


def trained(answer, world, run, steps):
    """The run of main over steps of (ranks, micro-batches)."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)).bfloat16()
    left, events, gradients = [number for number, step in enumerate(steps) if one_process(number, step)], [], []

    def note(what):
        events.append((what, len(run.records)))

    def put(step):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), parameters(step), strict=True):
                parameter.copy_(value)

    def looks(module, inputs, output):
        note("forward")
        if output.requires_grad:
            output.register_hook(lambda _: note("backward"))

    def update(given):
        given = list(given)
        for number, gradient in enumerate(given):
            if not isinstance(gradient, torch.Tensor) or gradient.dtype != torch.float32:
                got = str(getattr(gradient, "dtype", type(gradient).__name__))
                raise Wrong("type", f"the dtype of gradient {number} that update was given", "torch.float32", got)
        note("update")
        gradients.append([gradient.tolist() for gradient in given])
        if len(gradients) > len(left):
            raise Wrong("wrong", "how often update was called", str(len(left)), f"{len(gradients)} times or more")
        if len(gradients) < len(left):
            put(left[len(gradients)])

    put(left[0])
    model.register_forward_hook(looks)
    mine = [[(x.bfloat16(), t.float()) for x, t in step[world.rank]] for step in steps]
    run(answer.main, model, mine, update)
    expect("how often update was called", len(gradients), len(left), case="main(...)")
    return Run(gradients, events, run.records)


def told(step, world):
    """A step in words: how many tokens there are on each rank."""
    tokens = [[len(each.inputs) for each in row] for row in step]
    return f"tokens by rank and micro-batch {tokens}" if world.size < 4 else f"tokens of rank 0 {tokens[0]}, 4 ranks"


@test(points=4, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, run):
    """Whatever the numbers of tokens, every rank gets the gradients that one process has of all of them at once."""
    step = uneven(world.size, seed=1)
    got = trained(answer, world, run, [step]).gradients[0]
    expect("the gradients of a step", got, one_process(0, step), case=told(step, world))
    w1, w2 = parameters(0)
    near = [[Batch(x, torch.relu(x @ w1.T) @ w2.T + t * 2.0**-10) for x, t in row] for row in step]
    got = trained(answer, world, run, [near]).gradients[0]
    case = "outputs and targets are nearly equal, so that only float32 has their difference"
    expect("the gradients of a step", got, one_process(0, near), case=case)
    if world.size > 1:
        many = with_more_tokens(step)
        got = trained(answer, world, run, [many]).gradients[0]
        expect(
            "the gradients of a step",
            got,
            one_process(0, many),
            case=f"301 of 1024 tokens on rank 0, {world.size} ranks",
        )


@test(points=3, ranks=(1, 2))
def small_contributions_count(answer, world, run):
    """Micro-batches whose gradients are a thousandth of the sum are not lost in it."""
    rows = [[batch(7 + rank, 4), *(batch(20 + i, 1, 2.0**-5) for i in range(28))] for rank in range(world.size)]
    got = trained(answer, world, run, [rows]).gradients[0]
    case = "one micro-batch of 4 tokens, and 28 of one that is a 32nd as large"
    expect("the gradients of a step", got, one_process(0, rows), case=case)


@test(points=3, ranks=(2, 3))
def sends_once_per_step(answer, world, run):
    """Nothing is sent from the first micro-batch to the last; then each gradient once, in float32."""
    steps = [uneven(world.size, seed) for seed in (1, 3)]
    events, records = trained(answer, world, run, steps)[1:]
    expect("what is called", sorted({record.name for record in records}), ["all_reduce"], case="main(...)")
    before = 0  # messages before this step
    for number in range(len(steps)):
        end = [at for at, (what, _) in enumerate(events) if what == "update"][number]
        begin = max((at for at, (what, _) in enumerate(events[:end]) if what == "update"), default=-1) + 1
        ran = [sent - before for what, sent in events[begin:end] if what != "update"]
        case = f"step {number + 1} of {len(steps)}"
        expect("messages between the first micro-batch and the last", ran[-1] - ran[0], 0, case=case)
        # Without a number of up to 8 bytes, such as the count, which may be summed now or before the first one.
        sent = [record for record in records[before + ran[-1] : events[end][1]] if record.payload_bytes > 8]
        dtypes = sorted({str(record.dtype) for record in sent})
        expect("the dtype in which gradients are sent", dtypes, ["torch.float32"], case=case)
        most = len(SHAPES)
        what = f"at most {most} messages with gradients after the last one, not {len(sent)}"
        expect(what, len(sent) <= most, True, case=case)
        payload, least = sum(record.payload_bytes for record in records[before : events[end][1]]), 4 * NUMEL
        few = least <= payload <= least + 8
        expect(f"{least} bytes reduced, and at most 8 for one number, not {payload}", few, True, case=case)
        before = events[end][1]
    expect("messages after the last step", len(records) - before, 0, case="main(...)")


@test(points=2)
def one_micro_batch_at_a_time(answer, world, run):
    """Backward of a micro-batch comes before forward of the next one."""
    step = [[batch(30 + i, 2) for i in range(4)]]
    happened = [what for what, _ in trained(answer, world, run, [step]).events if what != "update"]
    expect("what happened", happened, ["forward", "backward"] * 4, case="a step of 4 micro-batches of 2 tokens")


@test(points=2, ranks=(2,))
def steps_are_independent(answer, world, run):
    """Nothing is left of the step before; a rank, or all, may have no token in a step; gradients may all be zero."""
    steps = [[[], []], uneven(2, 1), uneven(2, 5, empty=(0, 1)), uneven(2, 9, empty=(0,)), uneven(2, 13, empty=(1,))]
    steps.append(without_errors(5, uneven(2, 17)))
    got, numbers = trained(answer, world, run, steps).gradients, (1, 3, 4, 5)
    for gradients, number in zip(got, numbers, strict=True):
        case = f"step {number + 1} of 6, {told(steps[number], world)}"
        expect("the gradients of a step", gradients, one_process(number, steps[number]), case=case)


@test(points=1)
def destroys_the_process_group(answer, world, run):
    """When main returns, the process group is ended."""
    trained(answer, world, run, [uneven(1, 1)])
    expect("whether main has called init_process_group", run.joined, True, case="main(...)")
    expect("whether the process group was ended", run.ended, True, case="main(...)")


@test(points=1)
def runs_as_a_program(answer, run):
    """The whole file runs to its end when torchrun starts it."""
    linecache.getlines(__file__)  # torch looks up the lines of all callers, and for an answer this file is closed
    run(runpy.run_path, inspect.unwrap(answer.main).__code__.co_filename, run_name="__main__")
    expect("whether it has called init_process_group", run.joined, True, case="torchrun ... THIS_FILE")
