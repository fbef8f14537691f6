"""What 16 bits would lose is kept in float32, and what one rank sees in a step is decided for all ranks."""

import json
import math

import pytest
import torch
from torch import nn

from minidist.comm import World, bind
from minidist.config import PrecisionConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters
from minidist.precision import scaler as fast_scaler
from minidist.simple.data_parallel import BucketedReducer, NaiveReducer
from minidist.simple.mixed_precision import LossScaler, agree_on_step, copy_to_parameters, make_masters
from minidist.simple.pipeline import TiedGradient
from minidist.simple.zero import ZeroStage1
from minidist.train import step_result as fast


def test_masters_are_the_unrounded_initial_values():
    model = Transformer(ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2))
    init_parameters(model, 0)
    exact = {name: parameter.detach().clone() for name, parameter in named_parameters(model).items()}
    masters = make_masters(model, torch.bfloat16)
    for name, parameter in named_parameters(model).items():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name], exact[name])
        assert torch.equal(parameter, exact[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_fp32_training_and_parameters_are_their_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    masters, parameters = make_masters(model, dtype), dict(model.named_parameters())
    optimizers = [torch.optim.AdamW(tensors.values(), lr=1e-4) for tensors in (masters, reference)]
    for _ in range(50):
        for name, master in masters.items():
            master.grad = torch.randn(master.shape, generator=generator)
            reference[name].grad = master.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        copy_to_parameters(masters, parameters)
        for name, expected in reference.items():
            assert torch.equal(masters[name], expected)
            assert torch.equal(parameters[name].detach(), expected.to(dtype))


def random_overflows(steps: int, seed: int) -> list[bool]:
    """Overflows that come in runs, with pauses of up to ten steps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (steps,), generator=generator).tolist()
    return [number % 3 == 2 for number, length in enumerate(lengths) for _ in range(length)][:steps]


@pytest.mark.parametrize("interval", [1, 3, 7])
def test_scales_equal_those_of_torchs_grad_scaler(interval):
    config = PrecisionConfig(initial_scale=2.0**120, growth_interval=interval)  # near the end of fp32's range
    ours, weight = LossScaler(config), torch.zeros(1, requires_grad=True)
    torchs = torch.amp.GradScaler("cpu", init_scale=config.initial_scale, growth_interval=interval)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torchs.scale(torch.ones(1))  # makes its state
    for overflow in [False] * (9 * interval) + random_overflows(120, interval):
        weight.grad = torch.full((1,), math.inf if overflow else 0.0)
        torchs.step(optimizer)
        torchs.update()
        ours.update(overflow)
        assert ours.scale == torchs.get_scale()


def test_the_scalers_of_both_engines_agree_and_continue_each_others_state():
    config = PrecisionConfig(growth_interval=3, max_overflows=4)
    pair = [LossScaler(config), fast_scaler.LossScaler(config)]
    for step, overflow in enumerate(random_overflows(200, 0)):
        for each in pair:
            each.update(overflow)
        one, other = pair
        assert one.state_dict() == other.state_dict() and fast_scaler.LossScaler.is_valid_state(one.state_dict())
        assert (one.scale, one.overflowed, one.overflows_persist) == (
            other.scale,
            other.overflowed,
            other.overflows_persist,
        )
        if step % 5 == 0:  # each continues from what the other saved
            pair = [LossScaler(config), fast_scaler.LossScaler(config)]
            for each, state in zip(pair, (other.state_dict(), one.state_dict()), strict=True):
                each.load_state_dict(json.loads(json.dumps(state)))


def test_a_loaded_state_shares_no_list_with_its_source():
    one, other = (LossScaler(PrecisionConfig()) for _ in range(2))
    one.update(True)
    state = one.state_dict()
    other.load_state_dict(state)
    other.update(True)
    assert (len(one.overflowed), len(state["overflowed"]), len(other.overflowed)) == (1, 1, 2)


REDUCERS = {
    "naive": NaiveReducer,
    "bucketed": BucketedReducer,
    "zero1": lambda parameters, masters, group, _: ZeroStage1(parameters, masters, {}, group),
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", REDUCERS)
def test_gradients_of_micro_batches_are_added_in_float32(kind, is_tied):
    group = bind(World.single(), Mesh())["control"]
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    reducer = REDUCERS[kind]({"a": parameter}, {"a": torch.zeros(1)}, group, 2)
    tied = TiedGradient("a", parameter, group, reducer.add)
    for gradient in (1.0, 2.0**-9):  # their sum needs more bits than bf16 has
        (tied if is_tied else reducer).add("a", torch.full((1,), gradient, dtype=torch.bfloat16))
    if is_tied:
        tied.finish()
    reducer.finish()
    assert reducer.masters["a"].grad.item() == 1 + 2.0**-9


# loss and squared norm of rank 1, whether it asks for the end -> update_successful, overflowed, stop_requested, scale
DECISIONS = {
    "usual": ((1.0, 4.0, False), (True, False, False, 8.0)),
    "overflow": ((1.0, math.inf, False), (False, True, False, 4.0)),
    "loss not finite": ((math.nan, math.nan, False), (False, False, False, 8.0)),
    "stop": ((1.0, 4.0, True), (True, False, True, 8.0)),
}


def decide(world):
    group, found = bind(world, Mesh(dp=world.size))["control"], {}
    for name, (of_rank_1, _) in DECISIONS.items():
        scaler = LossScaler(PrecisionConfig(initial_scale=8.0))
        mine = of_rank_1 if world.rank == 1 else (1.0, 4.0, False)
        decision = agree_on_step(*mine, 10.0, scaler, group)
        found[name] = decision.update_successful, decision.overflowed, decision.stop_requested, scaler.scale
    return found


def test_what_one_rank_sees_is_decided_for_all(ranks):
    assert ranks(decide, 2) == [{name: expected for name, (_, expected) in DECISIONS.items()}] * 2


def decide_twice(world):
    """The decisions of the simple and of the fast engine when one rank's gradient overflows, or none."""
    group, found = bind(world, Mesh(dp=world.size))["control"], []
    for bad in (None, *range(world.size)):
        config, square = PrecisionConfig(growth_interval=1), math.inf if world.rank == bad else 4.0
        one, other = LossScaler(config), fast_scaler.LossScaler(config)
        ours = agree_on_step(0.5, square, False, 10.0, one, group)
        theirs, _ = fast.agree_on_step(0.5, square, False, (), 10.0, other, group)
        names = ("loss", "num_tokens", "update_successful", "is_finite", "overflowed", "stop_requested")
        equal = all(getattr(ours, name) == getattr(theirs, name) for name in names)
        found.append((ours.update_successful, equal, one.state_dict() == other.state_dict()))
    return found


def test_both_engines_decide_alike(ranks):
    assert ranks(decide_twice, 3) == [[(True, True, True)] + [(False, True, True)] * 3] * 3
