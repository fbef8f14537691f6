"""Tests of local_averaging: replicas with losses of their own, against a loop over all replicas in one process."""

import torch

from exercises.testing import expect, test
from minidist.comm import all_gather_object

RATE, NUMEL = 0.125, 5


def first(rank=0):
    return torch.linspace(-2, 2, NUMEL, dtype=torch.float64) + rank


def gradient(parameters, rank, step):
    """Of a quadratic whose curvature and minimum depend on the replica, and the minimum on the step."""
    return (1 + rank) * (parameters - 0.5 * step + rank)


def weight_of(rank):
    return 1.0 + 2 * rank


class LocalStep:
    """A step of SGD on this rank; records the numbers of its steps, and the network's messages before each."""

    def __init__(self, rank, network):
        self.rank, self._network, self.steps, self.messages = rank, network, [], []

    def __call__(self, parameters, step):
        self.steps.append(step)
        self.messages.append(len(self._network.records))
        parameters -= RATE * gradient(parameters, self.rank, step)


def one_process(size, rounds, weights):
    """The replicas of all ranks after these rounds of steps."""
    replicas = [first(rank) for rank in range(size)]
    for steps in rounds:
        for rank, replica in enumerate(replicas):
            for step in steps:
                replica -= RATE * gradient(replica, rank, step)
        mean = sum(w * r for w, r in zip(weights, replicas, strict=True)) / sum(weights)
        replicas = [mean.clone() for _ in replicas]
    return replicas


def run(answer, world, network, rounds, weights):
    parameters, local_step = first(world.rank), LocalStep(world.rank, network)
    for steps in rounds:
        answer.local_round(parameters, local_step, steps, weights[world.rank], network.group)
    return parameters, local_step


@test(points=4, ranks=(1, 2, 3))
def rounds_of_local_steps(answer, world, network):
    """Each replica takes the steps of the round by itself, then all replicas are merged by their weights."""
    weights = [weight_of(rank) for rank in range(world.size)]
    for rounds in ([range(1)], [range(3)], [range(4), range(4, 6), range(6, 9)]):
        parameters, local_step = run(answer, world, network, rounds, weights)
        case = f"rounds of the steps {', '.join(str(list(steps)) for steps in rounds)}"
        expect("the steps taken", local_step.steps, [step for steps in rounds for step in steps], case=case)
        expected = one_process(world.size, rounds, weights)[world.rank]
        expect("the parameters", parameters, expected, case=case, tolerance=1e-12)


@test(points=2, ranks=(2,))
def no_message_before_the_last_step(answer, world, network):
    """Replicas send nothing until all steps of the round are taken."""
    before = len(network.records)
    _, local_step = run(answer, world, network, [range(5)], [1.0, 1.0])
    expect("messages before each step", [count - before for count in local_step.messages], [0] * 5)
    expect("whether the replicas are merged afterwards", len(network.records) > before, True)


@test(points=2, ranks=(2, 3))
def replica_without_samples(answer, world, network):
    """A replica of weight 0, which has no steps to take, still gets the mean of the others."""
    weights = [0.0 if rank == world.size - 1 else 1.0 for rank in range(world.size)]
    steps = range(0) if weights[world.rank] == 0 else range(3)
    parameters, _ = run(answer, world, network, [steps], weights)
    expected = one_process(world.size, [range(3)], weights)[0]
    expect("the parameters", parameters, expected, case=f"weights {weights}", tolerance=1e-12)


@test(points=3, ranks=(1, 2, 3))
def drift_is_the_distance_from_the_mean(answer, world, network):
    """The drift is the root mean square of the replicas' distances from their mean, on every rank."""
    for scale in (1.0, 1e-3):
        mine = scale * torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64) * (world.rank + 1) ** 2
        kept = mine.clone()
        drift = answer.rms_distance_from_mean(mine, network.group)
        expect("the type of the result", type(drift).__name__, "float")
        factors = [(rank + 1) ** 2 for rank in range(world.size)]
        mean = sum(factors) / world.size
        expected = 5 * scale * (sum((f - mean) ** 2 for f in factors) / world.size) ** 0.5
        case = f"replicas [3, -4, 0] times {', '.join(f'{scale * factor:g}' for factor in factors)}"
        expect(
            "the drift on each rank",
            all_gather_object(drift, network.group),
            [expected] * world.size,
            case=case,
            tolerance=1e-9,
        )
        expect("the parameters afterwards", mine, kept, case=case)


@test(points=2, ranks=(2,))
def drift_keeps_its_digits(answer, world, network):
    """Equal replicas have no drift; small differences count, also beside large ones and in float32."""
    mine = torch.full((3,), 1000.0)
    expect("the drift", answer.rms_distance_from_mean(mine, network.group), 0.0, case="equal replicas")
    mine[1] += world.rank * 2.0**-13
    expect(
        "the drift",
        answer.rms_distance_from_mean(mine, network.group),
        2.0**-14,
        tolerance=1e-9,
        case="1000 and 1000 + 2**-13",
    )
    mine = torch.tensor([4096.0, 1.0]) * (1 - 2 * world.rank)  # the sum of the squares, 2**24 + 1, has 25 bits
    drift = answer.rms_distance_from_mean(mine, network.group)
    expect("the drift", drift, (2**24 + 1) ** 0.5, tolerance=1e-9, case="[4096, 1] and [-4096, -1]")
