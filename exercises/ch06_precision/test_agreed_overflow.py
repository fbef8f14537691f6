"""Tests of agreed_overflow: every rank knows what all of them were given, and adds it up by itself."""

import math

import torch

from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object
from minidist.config import PrecisionConfig
from minidist.precision.scaler import LossScaler

INF, NAN = math.inf, math.nan


def scaler_of():
    """A scaler that doubles after two good steps."""
    return LossScaler(PrecisionConfig(initial_scale=1024.0, growth_interval=2))


def given(rank, reports=2):
    """What a rank contributes: loss, squared norm, and so many reports; eighths, so that sums are exact."""
    return 0.125 + rank, 2.0 + 3 * rank, [0.5 * rank + 10 * index for index in range(reports)]


def decide(answer, world, network, *, spoil=None, loss=None, stop=False, reports=2, tokens=12.0, scaler=None):
    """One decision on this rank. spoil: this rank's squared norm, where it is another; loss: the same of the loss."""
    mine = given(world.rank, reports)
    loss, norm = mine[0] if loss is None else loss, mine[1] if spoil is None else spoil
    decision = answer.agree_on_step(loss, norm, stop, mine[2], tokens, scaler, network.group)
    if not isinstance(decision, tuple) or len(decision) != 2:
        raise Wrong(
            "type", "agree_on_step must return two things", "(StepResult, sums of extra_values)", repr(decision)[:80]
        )
    return decision


def simulate_schedule(result):
    return {name: getattr(result, name) for name in ("update_successful", "is_finite", "overflowed")}


GOOD = {"update_successful": True, "is_finite": True, "overflowed": False}
OVERFLOW = {"update_successful": False, "is_finite": False, "overflowed": True}
NOT_FINITE = {"update_successful": False, "is_finite": False, "overflowed": False}


@test(points=3, ranks=(1, 2, 3, 4))
def all_ranks_get_the_sums(answer, world, network):
    """Loss and reports are the sums over all ranks, and the norm is the root of the sum of squares."""
    for reports in (2, 0, 5):
        result, sums = decide(answer, world, network, reports=reports)
        losses, norms, each = zip(*(given(rank, reports) for rank in range(world.size)), strict=True)
        expect("the loss of all ranks", result.loss, sum(losses))
        expect("the type of the loss", type(result.loss).__name__, "float")
        expect("the gradient norm of all ranks", result.grad_norm, math.sqrt(sum(norms)))
        expect("the reports, added up", sums, [sum(column) for column in zip(*each, strict=True)])
        expect("the decision", simulate_schedule(result), GOOD)
        expect("whether somebody asked to stop", result.stop_requested, False)
    wide = 2.0**150  # beyond float32
    result, sums = decide(answer, world, network, spoil=wide, loss=1 + 2.0**-40)
    expect("the loss, with all digits of float64", result.loss, world.size * (1 + 2.0**-40))
    expect("the norm of a square that float32 has no room for", result.grad_norm, math.sqrt(world.size * wide))
    expect("the decision on such a norm", simulate_schedule(result), GOOD)


@test(points=3, ranks=(2, 4))
def all_skip_or_none(answer, world, network):
    """Whichever rank's gradients are not finite, all ranks know of it, skip, and halve the scale alike."""
    for bad in (INF, NAN):
        for rank in range(world.size):
            scaler = scaler_of()
            spoil = bad if world.rank == rank else None
            result, _ = decide(answer, world, network, spoil=spoil, scaler=scaler)
            case = f"the squared norm of rank {rank} is {bad}"
            expect("the decision", simulate_schedule(result), OVERFLOW, case=case)
            expect(
                "the scale of each rank",
                all_gather_object(scaler.scale, network.group),
                [512.0] * world.size,
                case=case,
            )
            expect("the scales that overflowed", scaler.overflowed, [1024.0], case=case)


@test(points=2, ranks=(3,))
def good_steps_grow_the_scale(answer, world, network):
    """The scaler learns of every step: two good ones double the scale, and one that overflows between begins anew."""
    scaler, scales = scaler_of(), []
    for step in range(7):
        spoil = INF if step == 3 and world.rank == world.size - 1 else None
        decide(answer, world, network, spoil=spoil, tokens=1.0, scaler=scaler)
        scales.append(scaler.scale)
    everywhere = all_gather_object(scales, network.group)
    expect(
        "the scale after each step, on each rank", everywhere, [[1024, 2048, 2048, 1024, 1024, 2048, 2048]] * world.size
    )


@test(points=2, ranks=(2,))
def non_finite_loss_is_no_overflow(answer, world, network):
    """A loss that is not finite is no overflow, and without a scaler nothing is; the step is skipped all the same."""
    last = world.rank == world.size - 1
    for bad in (INF, NAN, -INF):
        scaler = scaler_of()
        result, _ = decide(answer, world, network, loss=bad if last else None, scaler=scaler)
        case = f"the loss of the last rank is {bad}"
        expect("the decision", simulate_schedule(result), NOT_FINITE, case=case)
        expect("the scale", scaler.scale, 1024.0, case=case)
        expect("the scales that overflowed", scaler.overflowed, [], case=case)
        result, _ = decide(answer, world, network, loss=bad if last else None, spoil=INF, scaler=scaler)
        expect("the decision when the gradients are infinite too", simulate_schedule(result), NOT_FINITE, case=case)
    result, _ = decide(answer, world, network, spoil=INF if last else None)
    expect(
        "the decision without a scaler",
        simulate_schedule(result),
        NOT_FINITE,
        case="the squared norm of the last rank is inf",
    )


@test(points=1, ranks=(2,))
def no_tokens_no_step(answer, world, network):
    """A step without tokens is skipped, has no loss, and says nothing about the scale."""
    scaler = scaler_of()
    for _ in range(3):
        result, _ = decide(answer, world, network, spoil=0.0, loss=0.0, tokens=0.0, scaler=scaler)
        expect("whether the parameters are updated", result.update_successful, False)
        expect("the loss", result.loss, None)
    decide(answer, world, network, scaler=scaler)
    expect("the scale after three steps without tokens and one good one", scaler.scale, 1024.0)


@test(points=1, ranks=(3,))
def stop_reaches_all_ranks(answer, world, network):
    """When one rank asks to stop, all of them know; the step itself is not touched by it."""
    for rank in range(world.size):
        result, _ = decide(answer, world, network, stop=world.rank == rank)
        expect("whether somebody asked to stop", result.stop_requested, True, case=f"rank {rank} asks")
        expect("the decision", simulate_schedule(result), GOOD, case=f"rank {rank} asks")


@test(points=2, ranks=(2,))
def one_message(answer, world, network):
    """A decision is one all-reduce of loss, squared norm, stop and the reports, in float64."""
    for reports, spoil in ((2, None), (4, INF)):
        before = len(network.records)
        decide(answer, world, network, reports=reports, spoil=spoil, scaler=scaler_of())
        sent = [(record.name, str(record.dtype), record.payload_bytes) for record in network.records[before:]]
        expect("what was sent: (operation, format, bytes)", sent, [("all_reduce", "torch.float64", 8 * (3 + reports))])


@test(points=2, ranks=(3,))
def skipped_step_changes_no_bit(answer, world, network):
    """Ranks that shard a flat parameter and step if the decision says so: all step, or none changes a bit."""
    scaler, shard = scaler_of(), torch.full((2,), 1.0 + world.rank)
    for step in range(6):
        bad = step - 1 if step in (1, 2, 3) else None  # each rank in turn is the only one that overflows
        gradient = torch.full((2,), INF if world.rank == bad else 0.25 * scaler.scale) / scaler.scale
        result, _ = decide(answer, world, network, spoil=gradient.double().square().sum().item(), scaler=scaler)
        before = shard.clone()
        if result.update_successful:
            shard -= gradient
        moved = all_gather_object(not torch.equal(shard, before), network.group)
        case = f"step {step + 1}" + f", in which rank {bad} overflows" * (bad is not None)
        expect("ranks that have changed their shard", moved, [bad is None] * world.size, case=case)
        scales = all_gather_object(scaler.scale, network.group)
        expect("the scales of all ranks after it", scales, [scales[0]] * world.size, case=case)
    expect("the shard after three good steps", shard, [1.0 + world.rank - 0.75] * 2)
    expect("the scale after them", scaler.scale, 256.0)
