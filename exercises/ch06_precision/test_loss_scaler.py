"""Tests of loss_scaler: the reference is the update rule of torch, which is implemented in C++."""

import json

import torch

from exercises.testing import expect, test
from minidist.comm import all_reduce
from minidist.config import PrecisionConfig

GOOD, OVERFLOW = False, True


def expect_types(scaler, when):
    """Fail unless scale, `overflowed` and the state have the types of the statement."""
    state = scaler.state_dict()
    for where, scale, overflowed in (
        ("", scaler.scale, scaler.overflowed),
        (" of the state", state["scale"], state["overflowed"]),
    ):
        expect(f"the type of scale{where} {when}", type(scale).__name__, "float")
        types = [type(overflowed).__name__, *(type(each).__name__ for each in overflowed)]
        wanted = ["list", *["float"] * len(overflowed)]
        expect(f"the types of overflowed{where} and of its elements {when}", types, wanted)
    expect(f"the type of good_steps {when}", type(state["good_steps"]).__name__, "int")


def torch_scales(config, overflows):
    """Return torch.amp.GradScaler's scale, and its count of good steps, after each of these steps."""
    scale, good_steps, scales, counts = torch.tensor([config.initial_scale]), torch.zeros(1, dtype=torch.int32), [], []
    for overflow in overflows:
        torch._amp_update_scale_(scale, good_steps, torch.tensor(float(overflow)), 2.0, 0.5, config.growth_interval)
        scales.append(scale.item())
        counts.append(good_steps.item())
    return scales, counts


def learner_scales(answer, config, overflows):
    """Return the learner's scale, and good_steps of its state, after each of these steps."""
    scaler, scales, counts = answer.LossScaler(config), [], []
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.scale)
        counts.append(scaler.state_dict().get("good_steps"))
    return scales, counts


def expect_torch_scales(answer, config, overflows):
    steps = "".join("x" if overflow else "." for overflow in overflows)
    case = f"initial_scale {config.initial_scale:g}, growth_interval {config.growth_interval}; steps {steps[-40:]}"
    whats = ("the scale after each step (x: overflow)", "good_steps in the state after each step (x: overflow)")
    found = learner_scales(answer, config, overflows), torch_scales(config, overflows)
    for what, got, wanted in zip(whats, *found, strict=True):
        expect(what, got, wanted, case=case)


@test(points=2)
def halved_after_an_overflow(answer):
    """Each step that overflows halves the scale."""
    config = PrecisionConfig()
    for overflows in ([OVERFLOW], [OVERFLOW] * 3, [GOOD, OVERFLOW, GOOD]):
        expect_torch_scales(answer, config, overflows)


@test(points=2)
def doubled_after_good_steps(answer):
    """`growth_interval` consecutive good steps double the scale, and the count restarts."""
    for interval in (1, 2, 3):
        expect_torch_scales(answer, PrecisionConfig(growth_interval=interval), [GOOD] * 7)


@test(points=3)
def every_change_restarts_the_count(answer):
    """Good steps are counted from the last change of the scale."""
    for steps in ("..x..", ".x.x...", "..x.x..x....", "xx....x.....", "...x...x..."):
        for interval in (2, 3, 4):
            expect_torch_scales(answer, PrecisionConfig(growth_interval=interval), [step == "x" for step in steps])


@test(points=2)
def stays_in_float32_range(answer):
    """The scale doubles up to 2**127, and is halved without a lower limit."""
    for initial in (2.0**125, 2.0**126, 2.0**127):
        steps = [GOOD] * 7 + [OVERFLOW, *[GOOD] * 3]
        expect_torch_scales(answer, PrecisionConfig(initial_scale=initial, growth_interval=2), steps)
    expect_torch_scales(answer, PrecisionConfig(initial_scale=4.0, growth_interval=2), [OVERFLOW] * 40 + [GOOD] * 3)
    config = PrecisionConfig(initial_scale=2.0**-120)
    scales, case = learner_scales(answer, config, [OVERFLOW] * 60)[0], "initial_scale 2**-120, 60 overflows"
    expect("the scale after each step", scales, [2.0 ** (-121 - step) for step in range(60)], case=case)


@test(points=2)
def counts_consecutive_overflows(answer):
    """`overflowed` has the scales since the last good step; `overflows_persist` if there are `max_overflows`."""
    for most in (1, 3):
        scaler = answer.LossScaler(PrecisionConfig(max_overflows=most))
        for _ in range(2):
            wanted = []
            for count in range(most + 2):
                expect("`overflowed`, the scales of the consecutive steps that overflowed", scaler.overflowed, wanted)
                what = f"`overflows_persist` after {count} consecutive overflows, with max_overflows {most}"
                expect(what, scaler.overflows_persist, count >= most)
                wanted = [*wanted, scaler.scale]
                scaler.update(OVERFLOW)
            expect("`overflowed`, the scales of the consecutive steps that overflowed", scaler.overflowed, wanted)
            scaler.update(GOOD)
            expect("`overflowed` after a good step", scaler.overflowed, [])
            expect("`overflows_persist` after a good step", scaler.overflows_persist, False)


@test(points=2)
def continues_after_a_restart(answer):
    """A scaler that has loaded another's state from JSON continues exactly as the other one."""
    config = PrecisionConfig(growth_interval=3, max_overflows=3)
    for before in ("", "..", "x", "x.", "..x", "xx", "...xx", "xxxx"):
        for after in ("...", "x.x", "xxx", ".xxxx...."):
            saved = answer.LossScaler(config)
            for step in before:
                saved.update(step == "x")
            state = json.loads(json.dumps(saved.state_dict()))
            loaded = answer.LossScaler(config)
            loaded.load_state_dict(state)
            for count in range(len(after) + 1):
                case = f"saved after the steps '{before}', then '{after[:count]}' (x: overflow), max_overflows 3"
                for name in ("scale", "overflowed", "overflows_persist"):
                    wanted = getattr(saved, name)
                    expect(f"`{name}` of the scaler that loaded the state", getattr(loaded, name), wanted, case=case)
                if count < len(after):
                    saved.update(after[count] == "x")
                    loaded.update(after[count] == "x")
    first, second = answer.LossScaler(config), answer.LossScaler(config)
    first.update(OVERFLOW)
    state = first.state_dict()
    second.load_state_dict(state)
    second.update(OVERFLOW)
    expect("`overflowed` of a scaler whose state another one loaded and continued", first.overflowed, [65536.0])
    second.load_state_dict(state)
    wanted = {"scale": 32768.0, "good_steps": 0, "overflowed": [65536.0]}
    expect("the state of a scaler that has loaded the same state again", second.state_dict(), wanted)
    for step, name in ((OVERFLOW, "another overflow"), (GOOD, "a good step")):
        first.load_state_dict(state)
        saved = first.state_dict()
        first.update(step)
        for which, each in (("loaded", state), ("saved", saved)):
            expect(f"`overflowed` of a state that was {which} before {name}", each["overflowed"], [65536.0])
    first.load_state_dict(state)
    state["overflowed"].append(1.0)
    expect("`overflowed` after the list of the loaded state has changed", first.overflowed, [65536.0])
    first.state_dict()["overflowed"].append(1.0)
    expect("`overflowed` after the list of a saved state has changed", first.overflowed, [65536.0])
    scaler = answer.LossScaler(PrecisionConfig(initial_scale=1024, growth_interval=2))
    for count, step in enumerate((GOOD, GOOD, OVERFLOW, OVERFLOW, GOOD)):
        expect_types(scaler, f"after {count} steps from initial_scale=1024, an int")
        scaler.update(step)
    keys = sorted(answer.LossScaler(config).state_dict())
    expect("the keys of the state", keys, ["good_steps", "overflowed", "scale"])


@test(points=1, ranks=(1, 2))
def small_gradients_survive(answer, world, network):
    """Unscaled, a gradient of 2**-26 is 0 in fp16; scaled too much, one of 8 overflows: the scale settles between."""
    scaler = answer.LossScaler(PrecisionConfig(growth_interval=4))
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    seen, expected = [], []
    for step in range(12):
        large = 8.0 if step % 2 == world.size - 1 - world.rank else 1.0  # on one rank, in turn
        weight.grad = None
        loss = (weight[0] * large).float() + weight[1].float() * 2.0**-26
        (loss * scaler.scale).backward()
        total = weight.grad.float()
        all_reduce(total, network.group)
        overflow = not total.isfinite().all().item()
        seen.append((scaler.scale, [] if overflow else (total / scaler.scale).tolist()))
        scaler.update(overflow)
    scale, good = 65536.0, 0
    for step in range(12):
        each = [8.0 if step % 2 == world.size - 1 - rank else 1.0 for rank in range(world.size)]
        overflow = max(each) * scale > 65504
        expected.append((scale, [] if overflow else [sum(each), world.size * 2.0**-26]))
        good = 0 if overflow else good + 1
        scale, good = (scale / 2, 0) if overflow else (scale * 2, 0) if good == 4 else (scale, good)
    expect("for each step the scale, and the gradients divided by it unless one overflowed", seen, expected)
