"""Tests of local_averaging: replicas with losses of their own, against a loop over all replicas in one process."""

import torch

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, expect, test
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
    for rounds in ([range(1)], [range(3)], [range(4), range(4, 6), range(6, 9)], [range(9, 14, 2)]):
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
    """A replica of weight 0 gets the mean of the others, also if it has no steps to take; if it has, it takes them."""
    weights = [0.0 if rank == world.size - 1 else 1.0 for rank in range(world.size)]
    parameters, local_step = run(answer, world, network, [range(3)], weights)
    expect("the steps taken", local_step.steps, [0, 1, 2], case=f"weights {weights}")
    expected = one_process(world.size, [range(3)], weights)[0]
    expect("the parameters", parameters, expected, case=f"weights {weights}", tolerance=1e-12)
    steps = range(0) if weights[world.rank] == 0 else range(3)
    parameters, _ = run(answer, world, network, [steps], weights)
    case = f"weights {weights}, no steps for the replica of weight 0"
    expect("the parameters", parameters, expected, case=case, tolerance=1e-12)


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
    mine = torch.full((3,), 1000.0, dtype=torch.float64)  # whose squares would need 86 bits; float64 has 53
    mine[1] += world.rank * 2.0**-33
    drift = answer.rms_distance_from_mean(mine, network.group)
    expect("the drift", drift, 2.0**-34, tolerance=1e-16, case="1000 and 1000 + 2**-33, in float64")
    mine = torch.tensor([4096.0, 1.0]) * (1 - 2 * world.rank)  # the sum of the squares, 2**24 + 1, has 25 bits
    drift = answer.rms_distance_from_mean(mine, network.group)
    expect("the drift", drift, (2**24 + 1) ** 0.5, tolerance=1e-9, case="[4096, 1] and [-4096, -1]")


def step_of(rank):
    def step_in_place(parameters, step):
        parameters += (2 * step + 1) * (rank + 1)

    return step_in_place


def averaged_by_one_process(ranks, rank):
    """The weighted mean of the replicas, each after the steps of the round."""
    added = sum(2 * step + 1 for step in ranks[0]["steps"])
    total = sum(each["weight"] * (exact(each["parameters"]) + added * (i + 1)) for i, each in enumerate(ranks))
    return (total / sum(each["weight"] for each in ranks)).to(ranks[0]["parameters"].dtype)


def call_local_round(answer, group, parameters, steps, weight):
    answer.local_round(parameters, step_of(group.rank), steps, weight, group)
    return parameters


def distance_by_one_process(ranks, rank):
    every = torch.stack([each["parameters"] for each in ranks])
    return (every - every.mean(0)).square().sum(1).mean().sqrt()


def call_distance(answer, group, parameters):
    return torch.tensor(answer.rms_distance_from_mean(parameters, group), dtype=torch.float64)


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS),
        "steps": Drawn(
            lambda rank, ranks, draw: (range(3), range(0), range(3, 5))[draw],
            {"a round without steps": 1, "the second round": 2},
        ),
        "weight": Drawn(lambda rank, ranks, draw: rank + 1.0),
    },
    call=call_local_round,
    reference=averaged_by_one_process,
    changes=("parameters",),
    replicas=True,
    roundings=9,  # a product and a sum for each of at most seven ranks, then a quotient: half an epsilon each
    more_dtypes=(torch.float64,),  # of the weights
)

DISTANCE = Declaration(
    inputs={
        "parameters": Drawn(
            lambda rank, ranks, draw: torch.linspace(-3, 4, (5, 1, 20_000, 0)[draw], dtype=torch.float64) * (rank + 1),
            {"one parameter": 1, "20,000 parameters": 2, "no parameters": 3},
        )
    },
    call=call_distance,
    reference=distance_by_one_process,
    replicas=True,
    wire=False,
    roundings=100,  # sums of 20,000 squares in another order, whose errors are of either sign: less than their root
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size, layout and group, also one of only some ranks; calls do not influence each other."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(DISTANCE, answer, world, network)
