"""What 16 bits would lose is kept in float32, and what one rank sees in a step is decided for all ranks."""

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
from minidist.simple.data_parallel import BucketedReducer, NaiveReducer
from minidist.simple.mixed_precision import LossScaler, agree_on_step, make_masters
from minidist.simple.pipeline import TiedGradient
from minidist.simple.zero import ZeroStage1


def test_masters_are_the_unrounded_initial_values():
    model = Transformer(ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2))
    init_parameters(model, 0)
    exact = {name: parameter.detach().clone() for name, parameter in named_parameters(model).items()}
    masters = make_masters(model, torch.bfloat16)
    for name, parameter in named_parameters(model).items():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name], exact[name])
        assert torch.equal(parameter, exact[name].bfloat16())


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
