"""Tests of token_count: the reference is one process with all samples, in float64, by plain autograd."""

import torch

from exercises.conditions import Declaration, Drawn, check_conditions
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.comm import all_gather_object

START = [0.5, -1.0, 2.0]
# Tokens that count in each micro-batch, rank by rank: uneven padding. The last rank has more than all others.
COUNTS = [[2, 5], [1, 3], [4, 0, 2], [9, 7]]
WEIGHTS = [1.5, 0.25, 2.0, 1.0]


def tokens(rank, micro_batch, count):
    """(count, 3) float64 values that differ by rank and micro-batch."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def loss_sum(theta, x):
    """Return the sum over tokens of a nonlinear loss: ()."""
    return torch.log1p((x @ theta - 1).square()).sum()


def one_process(counts, weights):
    """Loss and gradient of the weighted mean over all tokens of all ranks, and the weighted number of tokens."""
    theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    total = sum(weight * n for weight, mine in zip(weights, counts, strict=True) for n in mine)
    parts = [
        weight * loss_sum(theta, tokens(rank, i, n))
        for rank, (weight, mine) in enumerate(zip(weights, counts, strict=True))
        for i, n in enumerate(mine)
    ]
    loss = sum(parts) / total
    loss.backward()
    return loss.item(), theta.grad.tolist(), total


def count_of(answer, num_tokens, weight, network):
    """Return the result of count_tokens. Raises Wrong unless it is a float."""
    count = answer.count_tokens(num_tokens, weight, network.group)
    if not isinstance(count, float):
        raise Wrong("type", "the result has the wrong type", "a float", type(count).__name__)
    return count


def sums_are_those_of_one_process(answer, world, network, counts, weights, case):
    """Check that the parts of all ranks, divided by the learner's count, sum to loss and gradient of one process."""
    loss, gradient, total = one_process(counts, weights)
    mine, weight = counts[world.rank], weights[world.rank]
    count = count_of(answer, list(mine), weight, network)
    expect("the weighted number of tokens", count, float(total), case=case, tolerance=1e-12)
    theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    part = 0.0
    for i, n in enumerate(mine):
        term = loss_sum(theta, tokens(world.rank, i, n)) * weight / count
        term.backward()
        part += term.item()
    parts = all_gather_object((part, [0.0] * 3 if theta.grad is None else theta.grad.tolist()), network.group)
    # Sums of some tens of float64 terms of size one, in another order.
    expect("the gradients of all ranks, summed", _sum([g for _, g in parts]), gradient, case=case, tolerance=1e-12)
    expect("the losses of all ranks, summed", sum(part for part, _ in parts), loss, case=case, tolerance=1e-12)


def _sum(rows):
    return [sum(column) for column in zip(*rows, strict=True)]


@test(points=2, ranks=(1, 2, 3))
def unequal_token_counts(answer, world, network):
    """Loss and gradient equal those of one process, with unequal token counts on ranks and micro-batches."""
    counts, weights = COUNTS[: world.size], [1.0] * world.size
    sums_are_those_of_one_process(answer, world, network, counts, weights, f"tokens per micro-batch {counts}")


@test(points=2, ranks=(4,))
def weights_of_data(answer, world, network):
    """w_i multiplies the token count of rank i, as it multiplies its losses; small weights work, too."""
    # With the second factor the weighted number of all tokens is below 1; with the third, float32 cannot represent the
    # weights.
    for factor in (1, 1 / 64, 1 / 3):
        counts, weights = COUNTS[: world.size], [weight * factor for weight in WEIGHTS[: world.size]]
        case = f"weights {weights}, tokens per micro-batch {counts}"
        sums_are_those_of_one_process(answer, world, network, counts, weights, case)


@test(points=2, ranks=(2,))
def a_rank_without_tokens(answer, world, network):
    """A rank without micro-batches or tokens, or with weight 0, adds 0 and takes part; without any token it is 0.0."""
    for counts, weights in [([[3, 2], []], [1.0, 1.0]), ([[], [4]], [2.0, 0.5]), ([[3], [4]], [1.0, 0.0])]:
        case = f"weights {weights}, tokens per micro-batch {counts}"
        sums_are_those_of_one_process(answer, world, network, counts, weights, case)
    for counts, weight in ([0, 0], 1.0), ([3], 0.0), ([], 1.0):
        case = f"weight {weight}, tokens per micro-batch {counts} on every rank"
        expect("the number of tokens", count_of(answer, counts, weight, network), 0.0, case=case)


@test(points=1, ranks=(2,))
def one_all_reduce_of_the_count(answer, world, network):
    """One number is all-reduced, once."""
    answer.count_tokens(COUNTS[world.rank], 1.0, network.group)
    expect("the operations sent", [record.name for record in network.records], ["all_reduce"])
    expect("the number of elements sent", [torch.Size(r.shape).numel() for r in network.records], [1])


@test(points=1, ranks=(1, 2))
def many_tokens(answer, world, network):
    """A count above 2**24 is exact, although float32 cannot represent it; weights may be integers."""
    for counts in ([2**24, 1], [2**31, 2**31 + 1], (2**50, 1, 2)):
        for weight in (1.0, 1, 3):
            got = count_of(answer, counts, weight, network)
            expect("the number of tokens", got, float(weight * world.size * sum(counts)))


DRAWN_COUNTS = {
    "unequal counts": lambda rank: [rank + 1, 2],
    "no count on rank 0": lambda rank: [3] * (rank > 0),
    "counts of zeros": lambda rank: [0, 0],
    "counts above 2**24": lambda rank: [2**24, rank + 1],
}


DECLARATION = Declaration(
    inputs={
        "num_tokens": Drawn(
            lambda rank, ranks, draw: list(DRAWN_COUNTS.values())[draw](rank),
            {description: number for number, description in enumerate(DRAWN_COUNTS) if number},
        ),
        "weight": Drawn(lambda rank, ranks, draw: (1.0, 0.25 * rank, 0.0)[draw], {"weights 0, 1/4, 1/2": 1, "0": 2}),
    },
    call=lambda answer, group, num_tokens, weight: answer.count_tokens(num_tokens, weight, group),
    reference=lambda ranks, rank: float(sum(sum(each["num_tokens"]) * each["weight"] for each in ranks)),
    replicas=True,
)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any numbers of tokens and weights, one call after the other, and a group of only some ranks; no list changes."""
    check_conditions(DECLARATION, answer, world, network)
