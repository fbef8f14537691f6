"""A server per shard, drift, rounds on the virtual clock, and the pictures of chapter 04."""

import matplotlib
import numpy as np
import pytest
import torch

from minidist.comm import GroupSpec, Meter, bind
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.simple.consistency import Server, asynchronous_worker, local_round
from minidist.tools.consistency.clock import (
    COMPUTING,
    LINK_BUSY,
    MESSAGE,
    WAITING,
    Durations,
    pulled_versions,
    run_on_virtual_clock,
    run_timed_workers,
)
from minidist.tools.consistency.drift import local_fixed_point, rms_distance_from_mean
from minidist.tools.consistency.pictures import plot_outer_step, plot_replica_paths, plot_staleness
from minidist.tools.consistency.rounds import simulate_rounds
from minidist.tools.consistency.sharded import sharded_step
from minidist.tools.simulate.failures import Phase

matplotlib.use("Agg")
CURVATURES, MINIMA = (1.0, 9.0, 4.0), (0.0, 1.0, -2.0)


def group_of(world, meter=None):
    return bind(world, Mesh(dp=world.size), [GroupSpec("replicas", ("dp",))], meter=meter)["replicas"]


def train_sharded(world, numel):
    meter = Meter()
    group, parameters = group_of(world, meter), torch.arange(numel, dtype=torch.float64)
    velocities = {}

    def update(values, total):
        velocities[0] = 0.5 * velocities.get(0, 0.0) + total
        values -= velocities[0]

    for step in range(2):
        sharded_step(parameters, torch.arange(numel, dtype=torch.float64) * (world.rank + 1) + step, update, group)
    return parameters, meter.wire_bytes["replicas"]


@pytest.mark.parametrize("size, numel", [(1, 5), (3, 7), (4, 2)])
def test_a_server_per_shard_is_synchronous_training(ranks, size, numel):
    expected, velocity = np.arange(float(numel)), 0.0
    for step in range(2):
        velocity = 0.5 * velocity + sum(np.arange(float(numel)) * (rank + 1) + step for rank in range(size))
        expected = expected - velocity
    found = ranks(train_sharded, size, numel)
    for rank, (parameters, sent) in enumerate(found):
        np.testing.assert_allclose(parameters.numpy(), expected, rtol=1e-12)
        own = numel // size + (rank < numel % size)
        assert sent == 2 * 8 * (numel - own + (size - 1) * own)


def measure_drift(world):
    return rms_distance_from_mean(torch.tensor([float(world.rank), 1.0]), group_of(world))


def test_drift_is_the_root_mean_square_distance_from_the_mean(ranks):
    assert ranks(measure_drift, 3) == pytest.approx([np.std([0.0, 1.0, 2.0])] * 3)


def run_local_rounds(world, num_steps, weights):
    group, theta = group_of(world), torch.zeros(1, dtype=torch.float64)

    def step(values, number):
        values -= 0.05 * CURVATURES[world.rank] * (values - MINIMA[world.rank])

    for _ in range(400):
        local_round(theta, step, range(num_steps), weights[world.rank], group)
    return theta.item()


@pytest.mark.parametrize("num_steps", [1, 5])
def test_local_rounds_on_quadratics_end_where_the_formula_says(ranks, num_steps):
    weights = (1.0, 2.0, 0.5)
    expected = local_fixed_point(CURVATURES, MINIMA, 0.05, num_steps, weights)
    assert ranks(run_local_rounds, 3, num_steps, weights) == pytest.approx([expected] * 3, rel=1e-9)
    exact = np.average(MINIMA, weights=np.multiply(weights, CURVATURES))
    assert (abs(expected - exact) < 1e-9) == (num_steps == 1)


def test_rounds_compute_wait_and_exchange_in_turn():
    first, second = simulate_rounds([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]], 0.5, h=2)
    assert second[:3] == [Phase(COMPUTING, 0.0, 2.0), Phase(COMPUTING, 2.0, 3.0), Phase(MESSAGE, 3.0, 3.5)]
    assert first[2:] == [
        *(Phase(WAITING, 2.0, 3.0), Phase(MESSAGE, 3.0, 3.5)),
        *(Phase(COMPUTING, 3.5, 4.5), Phase(MESSAGE, 4.5, 5.0)),
    ]


@pytest.mark.parametrize("shared_link", [False, True])
def test_the_phases_of_a_worker_fill_its_time(shared_link):
    durations = Durations([1.0, 2.0], [0.5, 0.5], shared_link=shared_link)
    server = Server(torch.zeros(1), torch.Tensor.add_, 2, bound=0)
    made = [asynchronous_worker(lambda values, step: values, 3) for _ in range(2)]
    timeline = run_on_virtual_clock(server, made, durations)
    for worker, phases in enumerate(timeline.phases):
        assert phases[0].start == 0.0 and all(a.stop == b.start for a, b in zip(phases, phases[1:], strict=False))
        assert sum(p.stop - p.start for p in phases if p.kind == WAITING) == pytest.approx(timeline.waited_s[worker])
        assert [p.stop - p.start for p in phases if p.kind == MESSAGE] == pytest.approx([0.5] * 6)
    assert any(p.kind == LINK_BUSY for phases in timeline.phases for p in phases) is shared_link


def test_staleness_leads_from_the_pull_to_the_push():
    assert plot_staleness([0, 1, 0], [0, 1, 1]) == [(0, 0, 1), (1, 0, 2), (0, 1, 3)]
    with pytest.raises(UserError, match="3 updates and 2 values"):
        plot_staleness([0, 1, 0], [0, 1], draw=False)


def test_paths_of_replicas_start_at_one_point():
    rounds = [
        [[(0.0, 0.0), (1.0, 0.0)], [(0.0, 0.0), (0.0, 2.0)]],
        [[(0.5, 1.0), (1.0, 1.0)], [(0.5, 1.0), (0.0, 1.5)]],
    ]
    starts = plot_replica_paths(rounds, lambda x, y: x**2 + y**2, {"minimum": (0.0, 0.0)})
    assert starts == [(0.0, 0.0), (0.5, 1.0)]
    rounds[1][0][0] = (9.0, 9.0)
    with pytest.raises(UserError, match="do not start at one point"):
        plot_replica_paths(rounds, lambda x, y: x, {}, draw=False)


@pytest.mark.parametrize("draw", [False, True])
def test_the_arrows_of_an_outer_step_are_the_gradient_and_the_velocity(draw):
    paths = [[(0.0, 0.0), (1.0, 0.0), (2.0, 0.0)], [(0.0, 0.0), (0.0, 2.0)]]
    points = plot_outer_step(paths, velocity=(-4.0, 1.0), lr=0.5, momentum=0.5, draw=draw)
    # The outer gradient is (-1, -1); the velocity becomes 0.5 * (-4, 1) + (-1, -1) = (-3, -0.5).
    assert points["start"] == (0.0, 0.0) and points["average"] == (1.0, 1.0)
    assert points["without momentum"] == (0.5, 0.5) and points["next start"] == (1.25, 0.625)


def test_an_outer_step_needs_a_common_start():
    with pytest.raises(UserError, match="2 replicas that do not start at one point"):
        plot_outer_step([[(0.0, 0.0)], [(1.0, 0.0)]], (0.0, 0.0), 0.7, 0.9, draw=False)


def test_timed_workers_pull_what_the_updates_before_have_made():
    """Updates at 1.5, 2.5, 3 and 5 s; a worker pulls right after its push."""
    server, timeline = run_timed_workers(Durations([1.0, 2.0], [0.25, 0.25]), num_steps=2)
    assert [worker for _, worker in timeline.updates] == [0, 1, 0, 1]
    assert server.staleness == [0, 1, 1, 1]
    assert pulled_versions(server, timeline) == [[0, 1], [0, 2]]
