"""Tests of weighted_merge: numpy's weighted average in float64, of replicas that all differ."""

import math
from dataclasses import replace

import numpy as np
import torch

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.comm import all_gather_object

WEIGHTS = ((1.0, 1.0, 1.0, 1.0), (0.1, 0.7, 0.3, 2.0), (4096.0, 0.0, 1000.0, 24.0))


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
    parameters = values(world.rank)
    try:
        answer.merge_replicas(parameters, 0.0, network.group)
        raised = "no error"
    except ValueError:
        raised = "ValueError"
    every = all_gather_object(raised, network.group)
    expect("what each rank raises", every, ["ValueError"] * world.size, case="all weights are 0")
    expect("the parameters", parameters, values(world.rank), case="all weights are 0")
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


def merged_by_one_process(ranks, rank):
    """The weighted mean of the replicas that count, rounded once to the dtype of the parameters."""
    if not any(each["weight"] for each in ranks):
        return ValueError
    total = sum(each["weight"] * exact(each["parameters"]) for each in ranks if each["weight"])
    return (total / sum(each["weight"] for each in ranks)).to(ranks[0]["parameters"].dtype)


def parameters_or_nan(rank, ranks, draw):
    """A replica's parameters: those of the last rank, whose weight may be 0, are of no use."""
    return torch.full((5,), math.nan) if draw and rank == ranks - 1 else values(rank, torch.float32)


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS),
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
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (ranks[0]["parameters"].nbytes + max(16, 4 * len(ranks))),
)
# The last replica has weight 0, and values that are of no use.
UNUSABLE = replace(
    DECLARATION,
    inputs={
        "parameters": Drawn(parameters_or_nan, {"the last replica is NaN": 1}),
        "weight": Drawn(lambda rank, ranks, draw: float(rank < ranks - 1 or ranks == 1)),
    },
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size, layout and group, also one of only some ranks; calls do not influence each other."""
    check_conditions(DECLARATION, answer, world, network)
    if world.size > 1:
        check_conditions(UNUSABLE, answer, world, network)
