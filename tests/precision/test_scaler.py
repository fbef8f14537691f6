"""The loss scale follows torch's GradScaler, and a checkpoint restores it."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minidist.config import PrecisionConfig
from minidist.precision.scaler import LossScaler


class Reference:
    """torch's own scaler around an SGD with one parameter, whose gradient is made to overflow or not."""

    def __init__(self, config: PrecisionConfig):
        self.parameter = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameter], 1.0)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=config.initial_scale, growth_interval=config.growth_interval
        )
        # The first `scale` makes the tensor that `update` changes.
        self.scaler.scale(torch.zeros(1))

    def update(self, overflow: bool) -> float:
        self.parameter.grad = torch.full((1,), float("nan") if overflow else 0.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@given(
    overflows=st.lists(st.booleans() | st.just(False), max_size=60),
    interval=st.integers(1, 5),
    initial=st.sampled_from([65536.0, 1.0, 1000.1, 3e38, 1e-44, 2.0**-149]),
)
@example([False] * 12, 2, 2.0**126)  # to the largest power of two, and no further
@example([True] * 3, 2, 2.0**-148)  # to 0, as torch's does
def test_the_scale_matches_torchs_gradscaler_at_every_step(overflows, interval, initial):
    config = PrecisionConfig(initial_scale=initial, growth_interval=interval)
    ours, theirs = LossScaler(config), Reference(config)
    assert ours.scale == theirs.scaler.get_scale()
    for overflow in overflows:
        ours.update(overflow)
        assert ours.scale == theirs.update(overflow)


def test_the_defaults_are_torchs():
    ours, theirs = LossScaler(PrecisionConfig()), torch.amp.GradScaler("cpu")
    assert ours.scale == theirs.get_scale() == 2.0**16
    for _ in range(theirs.get_growth_interval() - 1):
        ours.update(False)
    assert ours.scale == 2.0**16
    ours.update(False)
    assert ours.scale == 2.0**17
    ours.update(True)
    assert ours.scale == 2.0**16


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_loaded_scaler_continues_like_the_saved_one(before, after):
    config = PrecisionConfig(growth_interval=3, max_overflows=4)
    saved, loaded = LossScaler(config), LossScaler(config)
    for overflow in before:
        saved.update(overflow)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for overflow in after:
        saved.update(overflow)
        loaded.update(overflow)
        assert (loaded.scale, loaded.overflowed, loaded.overflows_persist) == (
            saved.scale,
            saved.overflowed,
            saved.overflows_persist,
        )


def test_a_state_is_not_changed_by_later_steps():
    scaler = LossScaler(PrecisionConfig())
    scaler.update(True)
    state = scaler.state_dict()
    scaler.update(True)
    assert state["overflowed"] == [2.0**16] and state["scale"] == 2.0**15
    other = LossScaler(PrecisionConfig())
    other.load_state_dict(state)
    other.update(True)
    assert state["overflowed"] == [2.0**16]


@pytest.mark.parametrize("most", [1, 3])
def test_consecutive_overflows_are_counted_with_their_scales(most):
    scaler = LossScaler(PrecisionConfig(max_overflows=most))
    for _ in range(most - 1):
        scaler.update(True)
    assert not scaler.overflows_persist
    scaler.update(False)
    assert scaler.overflowed == []
    start = scaler.scale
    for _ in range(most):
        assert not scaler.overflows_persist
        scaler.update(True)
    assert scaler.overflows_persist and scaler.overflowed == [start / 2**n for n in range(most)]
