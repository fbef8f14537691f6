"""Tests of outer_step: Nesterov's formula for the averaged differences of all rounds, in one process and float64."""

import math

import torch

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_gather_object

NUMEL, ROUNDS = 6, 4
SETTINGS = ((1.0, 0.0), (0.7, 0.9), (0.5, 0.3), (0.0, 0.5), (1.5, 1.0))


def first():
    return torch.linspace(-1, 1, NUMEL, dtype=torch.float64)


def inner_steps(parameters, rank, number):
    """What the inner optimizer of a replica does in a round, in place."""
    parameters *= 1 - 0.1 / (rank + 1)
    parameters += 0.05 * (number + 1) * torch.arange(NUMEL) - 0.1 * rank


def weight_of(rank):
    return 1.0 + rank


def one_process(size, lr, momentum, rounds=ROUNDS, weights=None):
    """The parameters and the velocity after every round: a sum over the differences of all rounds so far."""
    weights = weights or [weight_of(rank) for rank in range(size)]
    theta, differences, seen, velocities = first(), [], [], []
    for number in range(rounds):
        mean = torch.zeros(NUMEL, dtype=torch.float64)
        for rank, weight in enumerate(weights):
            replica = theta.clone()
            inner_steps(replica, rank, number)
            mean += weight / sum(weights) * replica
        differences.append(theta - mean)
        velocity = sum(momentum ** (number - i) * difference for i, difference in enumerate(differences))
        theta = theta - lr * (differences[-1] + momentum * velocity)
        seen.append(theta)
        velocities.append(velocity)
    return seen, velocities


def run(answer, world, network, lr, momentum, weights=None, rounds=ROUNDS):
    """The parameters and the velocity of this rank after every round."""
    parameters, seen, velocities = first(), [], []
    outer = answer.OuterStep(parameters, lr, momentum)
    weights = weights or [weight_of(rank) for rank in range(world.size)]
    for number in range(rounds):
        inner_steps(parameters, world.rank, number)
        outer.step(parameters, weights[world.rank], network.group)
        seen.append(parameters.clone())
        velocities.append(outer.velocity.clone())
    return seen, velocities


@test(points=4, ranks=(1, 2, 3))
def nesterov_on_the_averaged_difference(answer, world, network):
    """Every round ends with the parameters and velocity of SGD with Nesterov momentum on the averaged difference."""
    for lr, momentum in SETTINGS:
        got, velocities = run(answer, world, network, lr, momentum)
        expected, expected_velocities = one_process(world.size, lr, momentum)
        for number in range(ROUNDS):
            case = f"round {number + 1}, lr {lr}, momentum {momentum}"
            expect("the parameters", got[number], expected[number], case=case, tolerance=1e-12)
            expect("velocity", velocities[number], expected_velocities[number], case=case, tolerance=1e-12)


@test(points=2, ranks=(3,))
def rate_1_without_momentum_is_averaging(answer, world, network):
    """With lr 1 and momentum 0 a round ends with the weighted mean of the replicas."""
    got, _ = run(answer, world, network, 1.0, 0.0, rounds=1)
    replicas = [first() for _ in range(world.size)]
    for rank, replica in enumerate(replicas):
        inner_steps(replica, rank, 0)
    mean = sum(weight_of(rank) * replica for rank, replica in enumerate(replicas)) / 6
    expect("the parameters", got[0], mean, tolerance=1e-12)


@test(points=2, ranks=(2,))
def defaults_are_those_of_the_paper(answer, world, network):
    """OuterStep(parameters) has lr 0.7 and momentum 0.9."""
    parameters = first()
    outer = answer.OuterStep(parameters.clone())
    for number in range(2):
        inner_steps(parameters, world.rank, number)
        outer.step(parameters, weight_of(world.rank), network.group)
    expect("the parameters after two rounds", parameters, one_process(2, 0.7, 0.9)[0][1], tolerance=1e-12)


@test(points=3, ranks=(2, 3))
def states_are_equal_on_all_ranks(answer, world, network):
    """After each round `start` equals the parameters, and `start` and `velocity` are equal on all ranks."""
    parameters = first()
    outer = answer.OuterStep(parameters, 0.7, 0.9)
    for dtype in (torch.float64, torch.bfloat16):
        matrix = torch.arange(6.0, dtype=dtype).view(2, 3)
        fresh = answer.OuterStep(matrix)
        for name, expected in (("start", matrix), ("velocity", torch.zeros(2, 3))):
            state, case = getattr(fresh, name), f"before the first round, parameters {dtype} of shape (2, 3)"
            expect(name, state, expected, case=case)
            expect(f"the dtype of {name}", str(state.dtype), str(dtype), case=case)
            expect(f"whether {name} shares memory with the parameters", state.data_ptr() == matrix.data_ptr(), False)
    for number in range(2):
        inner_steps(parameters, world.rank, number)
        outer.step(parameters, weight_of(world.rank), network.group)
        expect("start, beside the parameters", outer.start, parameters, case=f"after round {number + 1}")
        every = all_gather_object((outer.start.tolist(), outer.velocity.tolist()), network.group)
        expect(
            "start and velocity of this rank, beside rank 0's",
            every[world.rank],
            every[0],
            case=f"after round {number + 1}",
        )
    parameters += 1
    changed = [bool((outer.start == parameters).any()), bool((outer.velocity == parameters).any())]
    expect("whether later inner steps change start or velocity", changed, [False, False])
    other = torch.zeros_like(parameters)
    loaded = answer.OuterStep(other, 0.7, 0.9)
    for mine, saved in ((loaded.start, outer.start), (loaded.velocity, outer.velocity), (other, parameters)):
        mine.copy_(saved)
    for each, values in ((outer, parameters), (loaded, other)):
        each.step(values, weight_of(world.rank), network.group)
    case = "after two rounds; start and velocity of another OuterStep are overwritten in place with those of this one"
    expect("the other's parameters after the next round", other, parameters, case=case, tolerance=1e-12)


@test(points=2, ranks=(2, 3))
def replica_of_weight_0(answer, world, network):
    """A replica of weight 0 does not count, even if it is NaN, and continues with the result."""
    weights = [2.0] * (world.size - 1) + [0.0]
    parameters = first()
    outer = answer.OuterStep(parameters, 0.7, 0.9)
    for number in range(2):
        inner_steps(parameters, world.rank, number)
        if weights[world.rank] == 0:
            parameters.fill_(math.nan)
        outer.step(parameters, weights[world.rank], network.group)
    expected = one_process(world.size, 0.7, 0.9, 2, weights)[0][1]
    expect("the parameters after two rounds", parameters, expected, case=f"weights {weights}", tolerance=1e-12)


@test(points=3, ranks=(2,))
def sends_the_difference_once(answer, world, network):
    """A round all-reduces as many elements as there are parameters, once; velocities are not sent."""
    parameters = torch.zeros(1000)
    outer = answer.OuterStep(parameters, 0.7, 0.9)
    for _ in range(2):
        parameters += world.rank + 1
        before = len(network.records)
        outer.step(parameters, 1.0, network.group)
        large = [(r.name, r.payload_bytes) for r in network.records[before:] if r.payload_bytes > 64]
        expect("messages of more than 64 bytes", large, [("all_reduce", 4000)])


def two_rounds_by_one_process(ranks, rank):
    """Two outer steps of rate 0.5 and momentum 0.5 in float64, rounded once."""
    total = sum(each["weight"] for each in ranks)
    theta, velocity = exact(ranks[0]["parameters"]), 0.0
    for number in range(2):
        mean = sum(each["weight"] * (theta - 4 * (each["rank"] + number)) for each in ranks) / total
        velocity = 0.5 * velocity + (theta - mean)
        theta = theta - 0.5 * ((theta - mean) + 0.5 * velocity)
    return theta.to(ranks[0]["parameters"].dtype)


def call_outer_step(answer, group, parameters, weight, rank):
    outer = answer.OuterStep(parameters, 0.5, 0.5)
    for number in range(2):
        parameters -= 4 * (rank + number)
        outer.step(parameters, weight, group)
    return parameters


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS, layouts=("slice", "transposed"), differs=False, non_finite=False),
        "weight": Drawn(
            lambda rank, ranks, draw: float(rank > 0 or ranks == 1) if draw else rank + 1.0, {"rank 0 has weight 0": 1}
        ),
        "rank": Drawn(lambda rank, ranks, draw: rank),
    },
    call=call_outer_step,
    reference=two_rounds_by_one_process,
    changes=("parameters",),
    replicas=True,
    roundings=24,  # twice: a product and a sum for each of at most seven ranks, a quotient, and four for the outer step
    more_dtypes=(torch.float64,),  # of the weights
    # In each of two rounds the difference there and back; a few bytes for the weights.
    max_bytes=lambda ranks: 4 * (len(ranks) - 1) * (ranks[0]["parameters"].nbytes + 16),
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size, layout and group, also one of some ranks; optimizers do not influence each other."""
    check_conditions(DECLARATION, answer, world, network)
