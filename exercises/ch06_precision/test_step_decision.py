"""Tests of step_decision: every rank knows what all of them were given, and updates by hand in whole numbers."""

import dataclasses
import itertools
import math
from unittest import mock

import torch

from exercises.testing import Wrong, expect, expect_raises, test
from minidist.comm import CommError
from minidist.config import PrecisionConfig
from minidist.precision.scaler import LossScaler
from minidist.simple.mixed_precision import Decision

INF, NAN = math.inf, math.nan
RATE, MOMENTUM = 0.5, 0.25
BF16 = torch.bfloat16
FIELDS = [field.name for field in dataclasses.fields(Decision)]


def make_scaler(interval=2):
    """A scaler at 64 that has had one good step, so that its count shows in its state."""
    scaler = LossScaler(PrecisionConfig(initial_scale=64.0, growth_interval=interval))
    if interval > 1:
        scaler.update(False)
    return scaler


def plain(decision):
    """A decision as {field: value}, with NaN as a text, because NaN is not equal to itself."""
    if type(decision) is not Decision:
        raise Wrong("type", "the result must be a Decision", "Decision", type(decision).__name__)
    values = {name: getattr(decision, name) for name in FIELDS}
    for name, value in values.items():
        if type(value) not in (float, int, bool, type(None)):
            raise Wrong("type", f"the type of {name}", "a number of Python", type(value).__name__)
    return {name: "nan" if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def decided(loss, num_tokens, grad_norm, update_successful, is_finite, overflowed, stop_requested=False):
    """The expected decision, as `plain` has it."""
    values = (loss, num_tokens, grad_norm, update_successful, is_finite, overflowed, stop_requested)
    return dict(zip(FIELDS, values, strict=True))


def expect_decision(answer, network, mine, wanted, case, num_tokens=8.0, scaler=None):
    """Fail unless this rank's arguments (loss, squared norm, request) lead to the expected decision."""
    found = plain(answer.agree_on_step(*mine, num_tokens, scaler, network.group))
    for name in FIELDS:
        off = 1e-12 if name == "grad_norm" else 0.0  # square roots may differ in the last bit
        expect(f"{name} of this rank's decision", found[name], wanted[name], case=case, tolerance=off)


@test(points=4, ranks=(1, 2, 3, 4))
def sums_the_parts_of_all_ranks(answer, world, network):
    """Loss and squared norm are the sums of the ranks' parts, in float64; any rank's request to stop reaches all."""
    ranks = range(world.size)
    for name, losses, squares in (
        ("small numbers", [0.75 * (rank + 1) for rank in ranks], [16.0] + [9.0] * (world.size - 1)),
        ("a part that float32 rounds away", [1 + 2.0**-40 * (rank + 1) for rank in ranks], [1 + 2.0**-40] * world.size),
        ("all of it on the last rank", [0.0] * (world.size - 1) + [2.5], [0.0] * (world.size - 1) + [4.0]),
        ("norms of 1e140 and more", [1.0 for _ in ranks], [(rank + 1) * 1e280 for rank in ranks]),
    ):
        for requests in ((), (0,), (world.size - 1,), tuple(ranks)):
            mine = (losses[world.rank], squares[world.rank], world.rank in requests)
            # Sums of two to four multiples of one power of two are exact; those of large numbers are compared loosely.
            norm = math.sqrt(sum(squares))
            wanted = decided(sum(losses), 8.0, norm, True, True, False, bool(requests))
            case = f"{name}; losses {losses}, stop requested by ranks {list(requests)}"
            if squares[0] > 1e200:
                got = plain(answer.agree_on_step(*mine, 8.0, None, network.group))
                expect("grad_norm / expected norm", got["grad_norm"] / norm, 1.0, tolerance=1e-12, case=case)
                wanted["grad_norm"] = got["grad_norm"]
                expect("the decision", got, wanted, case=case)
            else:
                expect_decision(answer, network, mine, wanted, case)


@test(points=1, ranks=(1, 2))
def fractions_of_a_token(answer, world, network):
    """A weighted number of tokens below 1 is a step like any other."""
    for num_tokens in (0.5, 1.0):
        scaler = make_scaler()
        wanted = decided(float(world.size), num_tokens, math.sqrt(4.0 * world.size), True, True, False)
        case = f"num_tokens {num_tokens}, a scaler that has had one of two good steps"
        expect_decision(answer, network, (1.0, 4.0, False), wanted, case, num_tokens=num_tokens, scaler=scaler)
        expect("the scale of this rank's scaler", scaler.scale, 128.0, case=case)


@test(points=4, ranks=(1, 2, 3, 4))
def skips_on_all_ranks(answer, world, network):
    """Whichever rank's norm is not finite, all ranks skip the step and halve the scale; without a scaler they skip."""
    for bad in (INF, NAN):
        for rank in range(world.size):
            for scaler in (make_scaler(), None):
                square = bad if world.rank == rank else 4.0
                stops = rank == world.rank
                wanted = decided(float(world.size), 8.0, "nan", False, False, scaler is not None, True)
                case = f"the squared norm of rank {rank} is {bad}, which also asks to stop"
                case += "" if scaler else "; no scaler"
                expect_decision(answer, network, (1.0, square, stops), wanted, case, scaler=scaler)
                if scaler is not None:
                    state = {"scale": 32.0, "good_steps": 0, "overflowed": [64.0]}
                    expect("the state of this rank's scaler", scaler.state_dict(), state, case=case)


@test(points=2, ranks=(1, 2, 3))
def a_bad_loss_is_no_overflow(answer, world, network):
    """If a rank's loss is not finite, all ranks skip the step, and the scaler does not learn of it."""
    for bad in (INF, NAN):
        for square in (NAN, 4.0):
            for rank in range(world.size):
                scaler = make_scaler()
                before = scaler.state_dict()
                mine = (bad, square, False) if world.rank == rank else (1.0, 4.0, False)
                found = plain(answer.agree_on_step(*mine, 8.0, scaler, network.group))
                case = f"loss and squared norm of rank {rank} are {bad} and {square}"
                for name in ("update_successful", "is_finite", "overflowed"):
                    expect(name, found[name], False, case=case)
                expect("grad_norm", found["grad_norm"], "nan", case=case)
                expect("whether the decision's loss is finite", math.isfinite(float(found["loss"])), False, case=case)
                expect("the state of this rank's scaler", scaler.state_dict(), before, case=case)


@test(points=2, ranks=(1, 2))
def steps_without_tokens(answer, world, network):
    """Without tokens there is no loss and no update, and the scaler does not learn of the step; requests count."""
    for stops in (False, True):
        for scaler in (make_scaler(), None):
            before = scaler and scaler.state_dict()
            wanted = decided(None, 0.0, 0.0, False, True, False, stops)
            case = "num_tokens 0" + " and a request of rank 0 to stop" * stops
            mine = (0.0, 0.0, stops and world.rank == 0)
            expect_decision(answer, network, mine, wanted, case, num_tokens=0.0, scaler=scaler)
            expect("the state of this rank's scaler", scaler and scaler.state_dict(), before, case=case)
    expect_rules_in_every_combination(answer, world, network)


def expect_rules_in_every_combination(answer, world, network):
    """Fail unless the decision follows the rules for all kinds of losses, norms and tokens, with and without scaler."""
    others = world.size - 1
    losses = ([0.0] * world.size, [-1.5] * world.size, *([1.0] * others + [bad] for bad in (INF, -INF, NAN)))
    squares = ([0.0] * world.size, [1.5e308] * world.size, *([4.0] * others + [last] for last in (5.0, INF, NAN)))
    combinations = itertools.product(losses, squares, (0.0, 0.001, 8.0), (True, False))
    for number, (loss, square, num_tokens, is_scaled) in enumerate(combinations):
        total, sum_of_squares, requests = sum(loss), sum(square), (number % 3 == 0, number % 5 == 0)
        stops = requests[world.rank % 2]
        scaler = make_scaler() if is_scaled else None
        finite = [math.isfinite(each) for each in (total, sum_of_squares)]
        norm = math.sqrt(sum_of_squares) if all(finite) else "nan"
        wanted = decided(
            (None if not num_tokens else "nan" if math.isnan(total) else total),
            num_tokens,
            norm,
            all(finite) and num_tokens > 0,
            all(finite),
            is_scaled and finite == [True, False],
            any(requests[: world.size]),
        )
        case = f"losses {loss}, squared norms {square}, {num_tokens} tokens" + ", no scaler" * (not is_scaled)
        found = plain(
            answer.agree_on_step(loss[world.rank], square[world.rank], stops, num_tokens, scaler, network.group)
        )
        for name in FIELDS:
            off = 1e-12 * max(1.0, norm) if name == "grad_norm" and norm != "nan" else 0.0
            expect(f"{name} of this rank's decision", found[name], wanted[name], case=case, tolerance=off)
        if is_scaled:
            state = {"scale": 64.0, "good_steps": 1, "overflowed": []}
            if num_tokens and finite[0]:
                state = {"scale": 128.0, "good_steps": 0, "overflowed": []}
                if not finite[1]:
                    state = {"scale": 32.0, "good_steps": 0, "overflowed": [64.0]}
            expect("the state of this rank's scaler", scaler.state_dict(), state, case=case)


@test(points=2, ranks=(2, 3))
def one_message(answer, world, network):
    """A step is one all-reduce of at most four float64 numbers, good or not; if it fails, nothing has changed."""
    for square in (4.0, INF):
        before = len(network.records)
        answer.agree_on_step(1.0, square if world.rank else 4.0, False, 8.0, make_scaler(), network.group)
        sent = [(record.name, str(record.dtype)) for record in network.records[before:]]
        case = f"the squared norm of the other ranks is {square}"
        expect("what was sent: (operation, dtype)", sent, [("all_reduce", "torch.float64")], case=case)
        payload = network.records[before].payload_bytes
        expect(f"at most 32 bytes, not {payload}", payload <= 32, True, case=case)

    scaler, broken = make_scaler(), RuntimeError("Connection closed by peer")
    before = scaler.state_dict()
    for square in (4.0, INF):
        with mock.patch.object(torch.distributed, "all_reduce", side_effect=broken):
            expect_raises(CommError, answer.agree_on_step, 1.0, square, False, 8.0, scaler, network.group)
        expect("the state of the scaler", scaler.state_dict(), before, case="the all-reduce fails")


class Side:
    """One rank's shard of a model in an fp16 step: masters, 16-bit parameters, optimizer, scaler."""

    def __init__(self, rank):
        shapes = ((2, rank + 1), (3,), ())  # ranks have different numbers of elements
        self.masters = [torch.arange(float(math.prod(shape))).reshape(shape) + 2.0**-10 for shape in shapes]
        self.parameters = [master.to(BF16) for master in self.masters]
        self.optimizer = torch.optim.SGD(self.masters, lr=RATE, momentum=MOMENTUM)
        self.scaler = LossScaler(PrecisionConfig(initial_scale=64.0, growth_interval=2))

    def step(self, answer, step, bad, network):
        """Make one step with gradients of step + 1, of which one element is `bad`; return the decision."""
        for master in self.masters:
            master.grad = torch.full_like(master, self.scaler.scale * (step + 1))
        if bad is not None:
            self.masters[step % 3].grad.view(-1)[-1] = bad
        for master in self.masters:
            master.grad /= self.scaler.scale
        square = sum(master.grad.double().square().sum().item() for master in self.masters)
        decision = answer.agree_on_step(1.0, square, False, 8.0, self.scaler, network.group)
        if decision.update_successful:
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return decision

    def tensors(self):
        states = [self.optimizer.state[master].get("momentum_buffer") for master in self.masters]
        return [None if t is None else t.tolist() for t in (*self.masters, *self.parameters, *states)]


@test(points=5, ranks=(1, 2, 3, 4))
def fp16_steps_of_all_ranks_or_none(answer, world, network):
    """Nine steps with overflows on one rank or another: all ranks make or skip each, and follow torch's scales."""
    side, by_hand = Side(world.rank), Side(world.rank)
    spoiled = {2: (0, INF), 3: (world.size - 1, NAN), 6: (1 % world.size, -INF)}
    scales = [64, 128, 64, 32, 32, 64, 32, 32, 64]
    for step in range(9):
        rank, bad = spoiled.get(step, (None, None))
        before = side.tensors()
        decision = side.step(answer, step, bad if rank == world.rank else None, network)
        done = (decision.update_successful, decision.overflowed, side.scaler.scale)
        wanted = (step not in spoiled, step in spoiled, float(scales[step]))
        case = f"step {step + 1}" + f", rank {rank} has a gradient of {bad}" * (step in spoiled)
        expect("update_successful, overflowed, and the next scale", done, wanted, case=case)
        if step in spoiled:
            expect("masters, parameters and momenta after a skipped step", side.tensors(), before, case=case)
            continue
        for master in by_hand.masters:
            master.grad = torch.full_like(master, float(step + 1))
        by_hand.optimizer.step()
        for parameter, master in zip(by_hand.parameters, by_hand.masters, strict=True):
            parameter.copy_(master)
        expect("masters, parameters and momenta", side.tensors(), by_hand.tensors(), case=case)
