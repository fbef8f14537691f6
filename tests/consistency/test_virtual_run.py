"""Asynchronous training on the virtual clock against the trainer, and delayed gradient descent against theory."""

import numpy as np
import pytest
import torch

from minidist.comm import World
from minidist.config import OptimConfig
from minidist.tools.consistency.clock import Durations
from minidist.tools.consistency.delay import (
    diverges_with_delay,
    max_stable_learning_rate,
    measure_max_stable_learning_rate,
)
from minidist.tools.consistency.virtual_run import train_on_virtual_clock
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import read_checkpoint, small_config, train_small, with_changes, write_text

SGD = OptimConfig(kind="sgd", lr=0.3, weight_decay=0.0, clip_norm=None, warmup_steps=2)
ADAMW = OptimConfig(lr=0.01, warmup_steps=2, clip_norm=1.0)
UNEVEN = Durations([1.0, 0.1, 2.0], [0.2, 3.0, 0.1], spread=0.8, seed=1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small is slower on every further thread
    yield
    torch.set_num_threads(threads)


def make_config(tmp_path, optim):
    changes = {"optim": optim, "precision__policy": "fp64", "data__min_length": 3, "model__dropout": 0.0}
    return small_config(tmp_path / "run", write_text(tmp_path), **changes)


def assert_same_run(config, run, **tolerance):
    """The run ends where the trainer's one process ends."""
    summary = train_small(World.single(), config)
    saved = read_checkpoint(config.folder, config.train.steps)
    for name, parameter in run.parameters.items():
        [tensor] = [saved[key] for key in saved if key.startswith(f"params/{name}[")]
        torch.testing.assert_close(parameter, tensor, **tolerance)
    assert run.held_out_loss == pytest.approx(summary["held_out_loss"], rel=1e-12)


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_one_asynchronous_worker_is_one_process(tmp_path, bound):
    config = make_config(tmp_path, ADAMW)
    run = train_on_virtual_clock(config, Durations([1.0], [0.1]), bound)
    assert run.staleness == [0] * 6
    assert_same_run(config, run, rtol=1e-12, atol=1e-12)


def test_staleness_bound_0_is_synchronous_training(tmp_path):
    config = make_config(tmp_path, SGD)
    run = train_on_virtual_clock(config, UNEVEN, staleness_bound=0)
    assert len(run.staleness) == 18
    assert_same_run(config, run, rtol=1e-12, atol=1e-12)
    free = train_on_virtual_clock(config, UNEVEN)
    assert max(free.staleness) > 2
    assert any(not torch.allclose(free.parameters[name], run.parameters[name], rtol=1e-6) for name in run.parameters)


def test_a_run_is_the_same_twice_and_weights_count(tmp_path):
    config = make_config(tmp_path, SGD)
    one, two = (train_on_virtual_clock(config, UNEVEN, staleness_bound=1) for _ in range(2))
    assert all(torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)
    assert (one.losses, one.staleness, one.timeline) == (two.losses, two.staleness, two.timeline)
    constant = OptimConfig(kind="sgd", lr=0.3, weight_decay=0.0, clip_norm=None, schedule="constant", warmup_steps=0)
    weighted = with_changes(config, data__weights=(0.0, 1.0, 0.0), optim=constant)
    two_leave = Durations(UNEVEN.compute_s, UNEVEN.transfer_s, leave_s={0: 0.0, 2: 0.0})
    alone, masked = train_on_virtual_clock(weighted, two_leave), train_on_virtual_clock(weighted, UNEVEN)
    assert all(torch.allclose(alone.parameters[n], masked.parameters[n], rtol=1e-12) for n in alone.parameters)


def test_many_workers_train_a_model(tmp_path):
    config = with_changes(make_config(tmp_path, SGD), train__global_batch=16, optim__lr=1.0)
    run = train_on_virtual_clock(config, Durations([1.0] * 16, [0.1] * 16, spread=0.5), num_updates=300)
    assert len(run.staleness) == 304 and max(run.staleness) >= 15
    assert np.mean(run.losses[-32:]) < np.mean(run.losses[:32]) - 0.5


@pytest.mark.parametrize("delay", [1, 8, *exhaustive(0, 2, 3, 4, 5, 6, 7)])
def test_the_largest_stable_rate_with_a_delay_is_that_of_theory(delay):
    assert measure_max_stable_learning_rate(delay, curvature=2.5) == pytest.approx(
        max_stable_learning_rate(delay, 2.5), rel=0.02
    )
    roots = np.roots(
        [1.0, -1.0, *[0.0] * (delay - 1), max_stable_learning_rate(delay)]
        if delay
        else [1.0, max_stable_learning_rate(0) - 1]
    )
    assert max(abs(roots)) == pytest.approx(1.0, abs=1e-9), "numpy: the boundary of stability"


def test_growth_is_seen_on_both_sides_of_the_boundary():
    assert diverges_with_delay(1.02 * max_stable_learning_rate(4), 4) and not diverges_with_delay(
        0.98 * max_stable_learning_rate(4), 4
    )
