"""Tests of weighted_merge: numpy's weighted average in float64, of replicas that all differ."""

import math

import numpy as np
import torch

from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object

WEIGHTS = ((1.0, 1.0, 1.0, 1.0), (0.1, 0.7, 0.3, 2.0), (4096.0, 0.0, 1000.0, 24.0))


def values(rank, dtype=torch.float64):
    """A replica's parameters: five elements, different on every rank."""
    return torch.linspace(-1, 2, 5, dtype=dtype) * (rank + 1) + 0.1 * rank


def average(weights):
    return np.average([values(rank).numpy() for rank in range(len(weights))], axis=0, weights=weights).tolist()


def merge(answer, network, parameters, weight):
    result = answer.merge_replicas(parameters, weight, network.group)
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
        parameters = merge(answer, network, values(world.rank), weights[world.rank])
        case = f"weights {', '.join(f'{weight:g}' for weight in weights)}"
        expect("the parameters", parameters, average(weights), case=case, tolerance=1e-12)


@test(points=3, ranks=(2, 3))
def replicas_are_equal_afterwards(answer, world, network):
    """After the merge all ranks hold the same bits, and a second merge changes nothing but rounding."""
    mine = merge(answer, network, values(world.rank, torch.float32), 1 / (3 + world.rank))
    every = all_gather_object(mine.tolist(), network.group)
    expect("the parameters of all ranks, as sets of equal ones", len({tuple(each) for each in every}), 1)
    again = merge(answer, network, mine.clone(), 5.0 + world.rank)
    expect("the parameters after another merge", again, mine, tolerance=1e-6)
    expect("the dtype of the parameters", str(again.dtype), "torch.float32")


@test(points=3, ranks=(2, 3))
def weight_0_does_not_count(answer, world, network):
    """A replica of weight 0 does not count, even if its values are NaN or infinite; it gets the mean of the others."""
    for bad in range(world.size):
        weights = [0.0 if rank == bad else 1.0 + rank for rank in range(world.size)]
        for number in (math.nan, math.inf):
            parameters = torch.full((5,), number, dtype=torch.float64) if world.rank == bad else values(world.rank)
            merge(answer, network, parameters, weights[world.rank])
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
    parameters = merge(answer, network, values(world.rank), 1.0)
    expect("the parameters after the next merge", parameters, average([1.0] * world.size), tolerance=1e-12)


@test(points=3, ranks=(2, 4))
def sends_the_parameters_once(answer, world, network):
    """The parameters are all-reduced once, in their dtype; besides them only a few bytes are sent."""
    before = len(network.records)
    merge(answer, network, torch.arange(1000.0) + world.rank, 1.0 + world.rank)
    records = network.records[before:]
    expect("operations", sorted({record.name for record in records}), ["all_reduce"])
    large = [record.payload_bytes for record in records if record.payload_bytes > 64]
    expect("bytes of each message of more than 64 bytes", [size - size % 100 for size in large], [4000])


@test(points=2, ranks=(2,))
def weights_keep_their_digits(answer, world, network):
    """Weights are counts of tokens: they are summed in float64, whatever the dtype of the parameters."""
    cases = (
        (torch.float64, (2.0**25 + 1, 1.0), 2.0**25 + 2, 1.0),  # float32 has 24 bits
        (torch.bfloat16, (257.0, 1.0), 129.0, 0.5),  # bfloat16 has 8 bits
    )
    for dtype, weights, value, expected in cases:
        parameters = torch.tensor([0.0, value * world.rank], dtype=dtype)
        merge(answer, network, parameters, weights[world.rank])
        case = f"{dtype}: [0, 0] of weight {weights[0]:.0f} and [0, {value:.0f}] of weight 1"
        expect("the parameters", parameters, [0.0, expected], case=case, tolerance=1e-12)
