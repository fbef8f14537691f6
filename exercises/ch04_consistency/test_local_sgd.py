"""Tests of local_sgd: numpy's weighted average, and a loop over all replicas in one process, in float64."""

import math
from dataclasses import replace

import numpy as np
import torch

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.comm import all_gather_object

RATE, NUMEL = 0.125, 5
WEIGHTS = (
    (1.0, 1.0, 1.0, 1.0),
    (0.1, 0.7, 0.3, 2.0),
    (4096.0, 0.0, 1000.0, 24.0),
    (3, 1, 0, 2),
    (3e-12, 1e-12, 5e-12, 0.0),
    (2e12, 1e12, 0.0, 7.0),
)


def values(rank, dtype=torch.float64):
    """A replica's parameters: five elements, different on every rank."""
    return torch.linspace(-1, 2, 5, dtype=dtype) * (rank + 1) + 0.1 * rank


def average(weights):
    return np.average([values(rank).numpy() for rank in range(len(weights))], axis=0, weights=weights).tolist()


def merge(answer, group, parameters, weight):
    result = answer.merge_replicas(parameters, weight, group)
    if result is not None:
        raise Wrong(
            "type", "merge_replicas overwrites the parameters and returns nothing", "None", type(result).__name__
        )
    return parameters


@test(points=4, ranks=(1, 2, 3, 4))
def weighted_mean_of_all_replicas(answer, world, network):
    """Every rank ends with sum_i w_i theta_i / sum_i w_i."""
    for weights in WEIGHTS:
        weights = weights[: world.size]
        parameters = merge(answer, network.group, values(world.rank), weights[world.rank])
        case = f"weights {', '.join(f'{weight:g}' for weight in weights)}"
        expect("the parameters", parameters, average(weights), case=case, tolerance=1e-12)


@test(points=3, ranks=(2, 3))
def replicas_are_equal_afterwards(answer, world, network):
    """After the merge all ranks hold the same bits, and a second merge changes nothing but rounding."""
    mine = merge(answer, network.group, values(world.rank, torch.float32), 1 / (3 + world.rank))
    every = all_gather_object(mine.tolist(), network.group)
    expect("the parameters of all ranks, as sets of equal ones", len({tuple(each) for each in every}), 1)
    again = merge(answer, network.group, mine.clone(), 5.0 + world.rank)
    expect("the parameters after another merge", again, mine, tolerance=1e-6)
    expect("the dtype of the parameters", str(again.dtype), "torch.float32")


@test(points=3, ranks=(2, 3))
def weight_0_does_not_count(answer, world, network):
    """A replica of weight 0 does not count, even if its values are NaN or infinite; it gets the mean of the others."""
    for bad in range(world.size):
        weights = [0.0 if rank == bad else 1.0 + rank for rank in range(world.size)]
        for number in (math.nan, math.inf):
            parameters = torch.full((5,), number, dtype=torch.float64) if world.rank == bad else values(world.rank)
            merge(answer, network.group, parameters, weights[world.rank])
            case = f"weights {weights}; all values of rank {bad} are {number}"
            expect("the parameters", parameters, average(weights), case=case, tolerance=1e-12)


@test(points=3, ranks=(1, 3))
def all_weights_0_are_an_error(answer, world, network):
    """If all weights are 0, every rank raises ValueError, and no parameter has changed."""
    for zero in (0.0, 0):
        parameters = values(world.rank)
        try:
            answer.merge_replicas(parameters, zero, network.group)
            raised = "no error"
        except ValueError:
            raised = "ValueError"
        every = all_gather_object(raised, network.group)
        expect("what each rank raises", every, ["ValueError"] * world.size, case=f"all weights are {zero}")
        expect("the parameters", parameters, values(world.rank), case=f"all weights are {zero}")
    parameters = merge(answer, network.group, values(world.rank), 1.0)
    expect("the parameters after the next merge", parameters, average([1.0] * world.size), tolerance=1e-12)


@test(points=3, ranks=(2, 4))
def sends_the_parameters_once(answer, world, network):
    """The parameters are all-reduced once, in their dtype; besides them only a few bytes are sent."""
    before = len(network.records)
    merge(answer, network.group, torch.arange(1000.0) + world.rank, 1.0 + world.rank)
    large = [record for record in network.records[before:] if record.payload_bytes > 64]
    what = "operations with more than 64 bytes, and their bytes"
    expect(what, [(record.name, record.payload_bytes // 100 * 100) for record in large], [("all_reduce", 4000)])


@test(points=2, ranks=(2,))
def weights_keep_their_digits(answer, world, network):
    """Weights are counts of tokens, which the dtype of the parameters may be unable to represent."""
    cases = (
        (torch.float64, (2.0**25 + 1, 1.0), 2.0**25 + 2, 1.0),  # float32 has 24 bits
        (torch.bfloat16, (257.0, 1.0), 129.0, 0.5),  # bfloat16 has 8 bits
        (torch.float16, (4096.0, 12288.0), 64.0, 48.0),  # 12288 * 64 is more than 65504, float16's largest number
        (torch.float16, (2.0**20, 3 * 2.0**20), 4.0, 3.0),  # the weights themselves are more than that
    )
    for dtype, weights, value, expected in cases:
        parameters = torch.tensor([0.0, value * world.rank], dtype=dtype)
        merge(answer, network.group, parameters, weights[world.rank])
        case = f"{dtype}: [0, 0] of weight {weights[0]:.0f} and [0, {value:.0f}] of weight {weights[1]:.0f}"
        expect("the parameters", parameters, [0.0, expected], case=case, tolerance=1e-12)


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
    strides = [range(9, 14, 2), range(8, 2, -3)]
    for rounds in ([range(1)], [range(3)], [range(4), range(4, 6), range(6, 9)], strides):
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


def merged_by_one_process(ranks, rank):
    """The weighted mean of the replicas that count, rounded once to the dtype of the parameters."""
    if not any(each["weight"] for each in ranks):
        return ValueError
    total = sum(each["weight"] * exact(each["parameters"]) for each in ranks if each["weight"])
    return (total / sum(each["weight"] for each in ranks)).to(ranks[0]["parameters"].dtype)


def parameters_or_nan(rank, ranks, draw):
    """A replica's parameters: those of the last rank, whose weight may be 0, are of no use."""
    return torch.full((5,), math.nan) if draw and rank == ranks - 1 else values(rank, torch.float32)


MERGE = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS, layouts=("slice", "transposed")),
        "weight": Drawn(
            lambda rank, ranks, draw: (rank + 1.0, 0.1 * (rank + 1), float(rank > 0), 0.0, 4096.0 * (rank + 1))[draw],
            {"weights below 1": 1, "rank 0 has weight 0": 2, "all weights are 0": 3, "token counts": 4},
        ),
    },
    call=merge,
    reference=merged_by_one_process,
    changes=("parameters",),
    replicas=True,
    roundings=9,  # a product and a sum for each of at most seven ranks, then a quotient: half an epsilon each
    more_dtypes=(torch.float64,),  # of the weights
    # The parameters there and back; a few bytes for the weights, which may be summed or gathered.
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (ranks[0]["parameters"].nbytes + 8 * max(2, len(ranks))),
)
# The last replica has weight 0, and values that are of no use.
UNUSABLE = replace(
    MERGE,
    inputs={
        "parameters": Drawn(parameters_or_nan, {"the last replica is NaN": 1}),
        "weight": Drawn(lambda rank, ranks, draw: float(rank < ranks - 1 or ranks == 1)),
    },
)


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


ROUND = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS, layouts=("slice", "transposed")),
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

DRIFT = Declaration(
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


@test(points=6, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size, layout and group, also one of only some ranks; calls do not influence each other."""
    check_conditions(MERGE, answer, world, network)
    if world.size > 1:
        check_conditions(UNUSABLE, answer, world, network)
    check_conditions(ROUND, answer, world, network)
    check_conditions(DRIFT, answer, world, network)
