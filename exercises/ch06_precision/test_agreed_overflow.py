"""Tests of agreed_overflow: every rank knows what all of them were given, and updates by hand in whole numbers."""

import dataclasses
import math

import torch

from exercises.testing import Wrong, expect, expect_raises, test
from minidist.comm import CommError, all_gather_object
from minidist.config import PrecisionConfig
from minidist.precision.scaler import LossScaler

INF, NAN = math.inf, math.nan
RATE, MOMENTUM = 0.5, 0.25
BF16 = torch.bfloat16


class Masters:
    """A part of the model on one rank: fp32 masters and the 16-bit parameters that they are rounded into."""

    def __init__(self, rank, bare=False):
        shapes = () if bare else ((2, rank + 1), (3,), ())  # ranks hold different numbers of elements
        self.masters = [torch.arange(float(math.prod(shape))).reshape(shape) + 2.0**-10 for shape in shapes]
        self.parameters = [master.to(BF16) for master in self.masters]

    def attach_grads(self, gradients, scale=1.0):
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float() / scale

    @torch.no_grad()
    def copy_to_params(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


class Side:
    """Everything that one rank hands to step_or_skip."""

    def __init__(self, rank, interval=2, bare=False):
        self.weights = Masters(rank, bare)
        self.optimizer = torch.optim.SGD(self.weights.masters or [torch.zeros(0)], lr=RATE, momentum=MOMENTUM)
        self.scaler = LossScaler(PrecisionConfig(initial_scale=64.0, growth_interval=interval))

    def gradients(self, step, dtype=torch.float32):
        scale = self.scaler.scale
        return [(scale * (torch.ones_like(m) * (step + 1) + m.round())).to(dtype) for m in self.weights.masters]

    def tensors(self):
        states = [self.optimizer.state[m].get("momentum_buffer") for m in self.weights.masters]
        found = [*self.weights.masters, *self.weights.parameters, *states]
        return [None if t is None else t.clone() for t in found]

    def call(self, answer, gradients, network):
        done = answer.step_or_skip(self.weights, gradients, self.optimizer, self.scaler, network.group)
        expect("the type of the result", type(done).__name__, "bool")
        for master in self.weights.masters:
            if master.grad is not None and master.grad.count_nonzero():
                raise Wrong("wrong", "a master still has a gradient after the step", "None", str(master.grad)[:60])
        return done


def equal(before, after):
    """Whether tensors are equal bit for bit."""
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(before, after, strict=True)
    )


def by_hand(masters, momenta, gradients, scale):
    for index, gradient in enumerate(gradients):
        momenta[index] = MOMENTUM * momenta[index] + gradient.float() / scale
        masters[index] = masters[index] - RATE * momenta[index]


@test(points=4, ranks=(1, 2, 3, 4))
def good_steps_update(answer, world, network):
    """Without an overflow every rank updates by its own gradients divided by the scale, and all scales stay equal."""
    for dtype in (torch.float32, torch.float16):
        side, scales = Side(world.rank), []
        masters = [m.clone() for m in side.weights.masters]
        momenta = [torch.zeros_like(m) for m in masters]
        for step in range(4):
            gradients = side.gradients(step, dtype)
            copies = [gradient.clone() for gradient in gradients]
            by_hand(masters, momenta, gradients, side.scaler.scale)
            case = f"step {step + 1}, loss scale {side.scaler.scale:g}, gradients in {dtype}".replace("torch.", "")
            expect("whether the step was made", side.call(answer, gradients, network), True, case=case)
            scales.append(side.scaler.scale)
            for number, (master, wanted) in enumerate(zip(side.weights.masters, masters, strict=True)):
                expect(f"master {number}", master, wanted, case=case)
                read = side.weights.parameters[number]
                expect(f"parameter {number}, which is its master rounded", read, wanted.to(BF16), case=case)
                expect(f"gradient {number} that was given", gradients[number], copies[number], case=case)
        expect("the scale after each of four good steps, growth_interval 2", scales, [64.0, 128.0, 128.0, 256.0])


@test(points=4, ranks=(1, 2, 3, 4))
def all_skip_or_none(answer, world, network):
    """Whichever gradient of whichever rank is not finite, no rank changes a bit, and all halve the scale."""
    for bad in (INF, NAN, -INF):
        for rank in range(world.size):
            side = Side(world.rank)
            side.call(answer, side.gradients(0), network)
            gradients = side.gradients(1)
            if world.rank == rank:
                gradients[rank % 3].view(-1)[-1] = bad
            before = side.tensors()
            case = f"an element of rank {rank}'s gradient {rank % 3} is {bad}"
            done = side.call(answer, gradients, network)
            everywhere = all_gather_object((done, equal(before, side.tensors()), side.scaler.scale), network.group)
            wanted = [(False, True, 32.0)] * world.size
            what = "of each rank: result, masters, parameters and momenta unchanged, scale"
            expect(what, everywhere, wanted, case=case)
            expect("the scales that overflowed", side.scaler.overflowed, [64.0], case=case)


@test(points=2, ranks=(3,))
def scales_stay_equal(answer, world, network):
    """Good steps and overflows in turn, each on another rank: the scales of all ranks are those of torch's rule."""
    side, results = Side(world.rank), []
    for step in range(9):
        gradients = side.gradients(step)
        if step in (2, 3, 6) and world.rank == step % 3:
            gradients[1][0] = INF
        results.append((side.call(answer, gradients, network), side.scaler.scale))
    wanted = [(True, 64), (True, 128), (False, 64), (False, 32), (True, 32), (True, 64), (False, 32)]
    wanted += [(True, 32), (True, 64)]
    expect("result and scale of each step, on each rank", all_gather_object(results, network.group), [wanted] * 3)


@test(points=2, ranks=(1, 2, 3))
def one_message(answer, world, network):
    """A step is one all-reduce of one fp32 number, good or not, on ranks without masters as well."""
    for bad in (None, 0):
        side = Side(world.rank, bare=world.rank == 1)
        gradients = side.gradients(0)
        if bad == world.rank:
            gradients[0][0] = NAN
        before = len(network.records)
        done = side.call(answer, gradients, network)
        sent = [(record.name, str(record.dtype), record.payload_bytes) for record in network.records[before:]]
        wanted = [("all_reduce", "torch.float32", 4)] if world.size > 1 else sent[:1]
        case = "no overflow" if bad is None else "an overflow on rank 0"
        expect("what was sent: (operation, dtype, bytes)", sent, wanted, case=case)
        expect("whether the step was made", done, bad is None, case=case)


@test(points=2, ranks=(2, 3))
def agrees_before_it_writes(answer, world, network):
    """Nothing is written before the message; if it fails, everything is as before, and the error goes to the caller."""
    events, side = [], Side(world.rank)
    attach, update = side.weights.attach_grads, side.scaler.update

    def note(name, call):
        def noted(*args, **kwargs):
            events.append((name, len(network.records)))
            return call(*args, **kwargs)

        return noted

    side.weights.attach_grads, side.scaler.update = note("attach_grads", attach), note("update", update)
    side.optimizer.step = note("step", side.optimizer.step)
    start = len(network.records)
    side.call(answer, side.gradients(0), network)
    early = sorted({name for name, sent in events if sent == start})
    expect("what was called before the all-reduce", early, [], case="no overflow")

    def broken(tensor, group, op, async_op):
        tensor.fill_(0)  # as if no rank had an overflow
        raise CommError("all_reduce failed: Connection closed by peer")

    before, state = side.tensors(), side.scaler.state_dict()
    group = dataclasses.replace(network.group, algorithm=broken)
    arguments = side.weights, side.gradients(1), side.optimizer, side.scaler, group
    expect_raises(CommError, answer.step_or_skip, *arguments)
    case = "the all-reduce fails"
    expect("whether masters, parameters and momenta are unchanged", equal(before, side.tensors()), True, case=case)
    expect("the state of the scaler", side.scaler.state_dict(), state, case=case)


@test(points=2, ranks=(2,))
def large_gradients_are_no_overflow(answer, world, network):
    """Gradients near the largest number of their dtype are finite, although their sum, square or norm is not."""
    for dtype in (torch.float16, torch.float32):
        side = Side(world.rank)
        large = torch.finfo(dtype).max
        gradients = [torch.full_like(m, large, dtype=dtype) for m in side.weights.masters]
        case = f"all gradients are {large:g}, in {dtype}".replace("torch.", "")
        expect("whether the step was made", side.call(answer, gradients, network), True, case=case)
