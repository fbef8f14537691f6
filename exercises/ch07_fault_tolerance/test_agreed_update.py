"""Tests of agreed_update: every rank knows what all of them were given, and updates by hand in whole numbers."""

import dataclasses
import math

import torch
from torch import nn

from exercises.testing import expect, expect_raises, test
from minidist.comm import CommError, all_gather_object
from minidist.config import PrecisionConfig
from minidist.fault.simple.run import Run
from minidist.precision.scaler import LossScaler

SHAPES = ((2, 3), (3,), ())
RATE, MOMENTUM = 0.5, 0.25


class Model(nn.Module):
    """Three parameters, of which one is a scalar."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        values = [torch.arange(float(math.prod(shape)), dtype=dtype).reshape(shape) - 1 for shape in SHAPES]
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])


def make_run(scale=None, dtype=torch.float32):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, foreach=False)
    scaler = scale and LossScaler(PrecisionConfig(initial_scale=scale, growth_interval=2))
    return Run(model, optimizer, None, 10, 2, lambda step: RATE, scaler=scaler)


def gradient(rank, step, scale=1.0):
    return [scale * (torch.arange(float(math.prod(s))).reshape(s) * (1 + rank) + step - 2 * rank) for s in SHAPES]


def tensors_of(run):
    values = [parameter.detach().clone() for parameter in run.model.parameters()]
    states = [run.optimizer.state[p].get("momentum_buffer") for p in run.model.parameters()]
    return values, [None if state is None else state.clone() for state in states]


def by_hand(size, steps):
    """The parameters after these steps, each a number that all ranks were given."""
    values, momenta = [p.detach().clone() for p in Model().parameters()], [torch.zeros(shape) for shape in SHAPES]
    for step in steps:
        for index in range(len(SHAPES)):
            total = sum(gradient(rank, step)[index] for rank in range(size))
            momenta[index] = MOMENTUM * momenta[index] + total
            values[index] = values[index] - RATE * momenta[index]
    return values


def update(answer, run, gradients, network, usable=True):
    updated = answer.agreed_update(run, gradients, usable, network.group)
    expect("the type of the result", type(updated).__name__, "bool")
    return updated


@test(points=4, ranks=(1, 2, 3, 4))
def updates_by_the_sum(answer, world, network):
    """Each update is that of the sum of all ranks' gradients, divided by the loss scale."""
    for scale in (None, 1024.0):
        run = make_run(scale)
        for step in range(4):
            current = run.scaler.scale if scale else 1.0
            case = f"step {step + 1}, " + (f"loss scale {current:g}" if scale else "no loss scaling")
            done = update(answer, run, gradient(world.rank, step, current), network)
            expect("whether the ranks updated", done, True, case=case)
            expect("the parameters", tensors_of(run)[0], by_hand(world.size, range(step + 1)), case=case)
            kept = [parameter.grad is None or not parameter.grad.any() for parameter in run.model.parameters()]
            expect("whether the gradients are cleared", kept, [True] * len(SHAPES), case=case)
        if scale:
            expect("the loss scale, which grows after two good steps", run.scaler.scale, 4096.0)


@test(points=4, ranks=(2, 3, 4))
def one_unusable_rank_stops_all(answer, world, network):
    """If any rank has no gradients, no bit changes anywhere, and the scaler learns of nothing."""
    for bad in range(world.size):
        run = make_run(64.0)
        update(answer, run, gradient(world.rank, 0, 64.0), network)
        before, state = tensors_of(run), run.scaler.state_dict()
        for content in (0.0, math.nan):
            mine = gradient(world.rank, 1, 64.0)
            if world.rank == bad:
                mine = [torch.full_like(each, content) for each in mine]
            done = update(answer, run, mine, network, usable=world.rank != bad)
            case = f"rank {bad} has no gradients; its tensors are full of {content}"
            expect("whether the ranks updated", done, False, case=case)
            expect("parameters and momenta", tensors_of(run), before, case=case)
            expect("the state of the scaler", run.scaler.state_dict(), state, case=case)
        update(answer, run, gradient(world.rank, 2, 64.0), network)
        expect("the parameters after the next step", tensors_of(run)[0], by_hand(world.size, (0, 2)))


@test(points=3, ranks=(2, 3))
def overflow_stops_all(answer, world, network):
    """If any rank's gradient is not finite, all ranks skip the update and halve the scale."""
    for bad in range(world.size):
        for number in (math.inf, -math.inf, math.nan):
            run = make_run(64.0)
            before, mine = tensors_of(run)[0], gradient(world.rank, 0, 64.0)
            if world.rank == bad:
                mine[1][2] = number
            done = update(answer, run, mine, network)
            case = f"one element of rank {bad} is {number}"
            expect("whether the ranks updated", done, False, case=case)
            expect("the parameters", tensors_of(run)[0], before, case=case)
            scales = all_gather_object(run.scaler.scale, network.group)
            expect("the loss scale of each rank", scales, [32.0] * world.size, case=case)


@test(points=2, ranks=(2,))
def finite_parts_with_an_infinite_sum(answer, world, network):
    """The sum may overflow although each rank's gradient is finite; without a scaler this skips the step as well.

    Large elements are no overflow as long as each element of the sum is finite.
    """
    for scale in (None, 64.0):
        run = make_run(scale)
        before = tensors_of(run)[0]
        mine = [torch.full(shape, 3e38) for shape in SHAPES]
        expect("whether the ranks updated", update(answer, run, mine, network), False, case="3e38 on both ranks")
        expect("the parameters", tensors_of(run)[0], before, case="3e38 on both ranks")
        if scale:
            expect("the loss scale", run.scaler.scale, 32.0, case="3e38 on both ranks")
        run, case = make_run(scale), "1e38 in every element on both ranks: each element of the sum is 2e38"
        mine = [torch.full(shape, 1e38) for shape in SHAPES]
        wanted = [value - RATE * (2 * each / (scale or 1)) for value, each in zip(before, mine, strict=True)]
        expect("whether the ranks updated", update(answer, run, mine, network), True, case=case)
        expect("the parameters", tensors_of(run)[0], wanted, case=case)


@test(points=3, ranks=(2,))
def one_message(answer, world, network):
    """One all-reduce per step, of one element more than the gradients have, in their dtype."""
    numel = sum(math.prod(shape) for shape in SHAPES)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for usable in (True, False):
            before, mine = len(network.records), [each.to(dtype) for each in gradient(world.rank, 0, 8.0)]
            update(answer, make_run(8.0, dtype), mine, network, usable=usable or world.rank == 0)
            kind = str(dtype).removeprefix("torch.")
            sent = [(r.name, str(r.dtype).removeprefix("torch."), r.payload_bytes) for r in network.records[before:]]
            wanted = [("all_reduce", kind, dtype.itemsize * (numel + 1))]
            expect("what is sent: (operation, dtype, bytes)", sent, wanted, case=f"gradients in {kind}")


@test(points=4, ranks=(2,))
def broken_connection_changes_nothing(answer, world, network):
    """If the all-reduce fails, CommError is raised, and parameters, momenta and scaler are those of the last step."""

    def broken(tensor, group, op, async_op):
        tensor.fill_(7)  # as of a sum that was half done
        raise CommError("all_reduce failed: Connection closed by peer")

    run = make_run(64.0)
    update(answer, run, gradient(world.rank, 0, 64.0), network)
    before, state = tensors_of(run), run.scaler.state_dict()
    group, mine = dataclasses.replace(network.group, algorithm=broken), gradient(world.rank, 1, 64.0)
    infinite = [torch.full(shape, math.inf) for shape in SHAPES]
    for case, gradients in {"finite gradients": mine, "gradients that have overflowed": infinite}.items():
        expect_raises(CommError, answer.agreed_update, run, gradients, True, group)
        expect("parameters and momenta", tensors_of(run), before, case=f"{case}; the all-reduce fails")
        expect("the state of the scaler", run.scaler.state_dict(), state, case=f"{case}; the all-reduce fails")
    expect("this rank's gradients, with which the step may be repeated", mine, gradient(world.rank, 1, 64.0))
    update(answer, run, mine, network)
    expect("the parameters after the step is repeated", tensors_of(run)[0], by_hand(world.size, (0, 1)))
