"""Tests of weighted_loss: the reference is one process with all samples, in float64, by plain autograd."""

import torch

from exercises.conditions import Declaration, Drawn, check_conditions
from exercises.observations import timeline
from exercises.testing import CONDITION_RANKS, expect, expect_raises, test
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
    """Loss and gradient of the weighted mean over all tokens of all ranks."""
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


def step(answer, world, network, counts, weights):
    """Run the learner's step on this rank; return its part of the loss, its gradient and the count."""
    theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    mine, weight = counts[world.rank], weights[world.rank]
    count = answer.all_reduce_token_count(list(mine), weight, network.group)
    loss = answer.backward((loss_sum(theta, tokens(world.rank, i, n)) for i, n in enumerate(mine) if n), weight, count)
    return float(loss), theta.grad, count.value


def sums_are_those_of_one_process(answer, world, network, counts, weights, case):
    """Check that the parts of all ranks sum to the loss and the gradient of one process."""
    loss, gradient, total = one_process(counts, weights)
    mine, grad, count = step(answer, world, network, counts, weights)
    parts = all_gather_object((mine, [0.0] * 3 if grad is None else grad.tolist()), network.group)
    expect("the weighted number of counted tokens", count, total, case=case, tolerance=1e-12)
    # Sums of some tens of float64 terms of size one, in another order.
    expect("the gradients of all ranks, summed", _sum([g for _, g in parts]), gradient, case=case, tolerance=1e-12)
    expect("the losses of all ranks, summed", sum(part for part, _ in parts), loss, case=case, tolerance=1e-12)


def _sum(rows):
    return [sum(column) for column in zip(*rows, strict=True)]


@test(points=3, ranks=(1, 2))
def unequal_token_counts(answer, world, network):
    """Loss and gradient equal those of one process, with unequal token counts on ranks and micro-batches."""
    counts, weights = COUNTS[: world.size], [1.0] * world.size
    sums_are_those_of_one_process(answer, world, network, counts, weights, f"tokens per micro-batch {counts}")


@test(points=3, ranks=(4,))
def weights_of_data(answer, world, network):
    """w_i multiplies both the losses and the token count of rank i; small weights work, too."""
    for factor in (1, 1 / 64):  # with the second, the weighted number of all tokens is below 1
        counts, weights = COUNTS[: world.size], [weight * factor for weight in WEIGHTS[: world.size]]
        case = f"weights {weights}, tokens per micro-batch {counts}"
        sums_are_those_of_one_process(answer, world, network, counts, weights, case)


@test(points=2, ranks=(2,))
def a_rank_without_samples(answer, world, network):
    """A rank without tokens, or with weight 0, adds zero and still takes part in the collectives."""
    for counts, weights in [([[3, 2], []], [1.0, 1.0]), ([[], [4]], [2.0, 0.5]), ([[3], [4]], [1.0, 0.0])]:
        case = f"weights {weights}, tokens per micro-batch {counts}"
        sums_are_those_of_one_process(answer, world, network, counts, weights, case)


@test(points=2, ranks=(2,))
def no_counted_token(answer, world, network):
    """If no rank has a counted token, no backward runs: the gradient stays None and the loss is 0."""
    for counts, weight in ([0, 0], 1.0), ([3], 0.0), ([], 1.0):
        theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)
        count = answer.all_reduce_token_count(counts, weight, network.group)
        parts = (loss_sum(theta, tokens(world.rank, i, n)) for i, n in enumerate(counts))
        case = f"weight {weight}, tokens per micro-batch {counts} on every rank"
        expect("the loss", float(answer.backward(parts, weight, count)), 0.0, case=case)
        expect("the gradient", theta.grad, None, case=case)
        expect("the number of counted tokens", count.value, 0, case=case)


@test(points=3, ranks=(2,))
def one_all_reduce_of_the_count(answer, world, network):
    """One number is all-reduced, once, and is in flight when all_reduce_token_count returns."""
    theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)

    def forwards():
        for i, n in enumerate(COUNTS[world.rank]):
            network.event("forward")
            yield loss_sum(theta, tokens(world.rank, i, n))

    count = answer.all_reduce_token_count(COUNTS[world.rank], 1.0, network.group)
    network.event("all_reduce_token_count has returned")
    answer.backward(forwards(), 1.0, count)
    expect("the operations sent", [record.name for record in network.records], ["all_reduce"])
    expect("the elements sent", [record.shape for record in network.records], [(1,)])
    order = timeline(network)
    expect("the first two events", order[:2], ["launch 0", "all_reduce_token_count has returned"])


@test(points=2)
def one_micro_batch_at_a_time(answer, world, network):
    """The backward of a micro-batch ends before the next forward begins, so its activations are freed."""
    theta, events = torch.tensor(START, dtype=torch.float64, requires_grad=True), []
    theta.register_post_accumulate_grad_hook(lambda _: events.append("backward"))

    def forwards():
        for i in range(3):
            events.append("forward")
            yield loss_sum(theta, tokens(0, i, 4))

    loss = answer.backward(forwards(), 1.0, answer.all_reduce_token_count([4, 4, 4], 1.0, network.group))
    expect("what happened", events, ["forward", "backward"] * 3)
    expect("whether the returned loss keeps the autograd graph", getattr(loss, "requires_grad", False), False)
    part = loss_sum(theta, tokens(0, 0, 4))
    answer.backward([part], 1.0, answer.all_reduce_token_count([4], 1.0, network.group))
    expect_raises(RuntimeError, part.backward)  # the tensors of its graph are freed: it cannot run again


@test(points=1)
def many_tokens(answer, world, network):
    """A count above 2**24 is exact, although float32 cannot represent it; `counts` may be an iterator."""
    for counts in ([2**24, 1], [2**31, 2**31 + 1]):
        expect("the count", answer.all_reduce_token_count(iter(counts), 1.0, network.group).value, sum(counts))


DRAWN_COUNTS = {
    "unequal counts": lambda rank: [rank + 1, 2],
    "no count on rank 0": lambda rank: [3] * (rank > 0),
    "counts of zeros": lambda rank: [0, 0],
    "counts above 2**24": lambda rank: [2**24, rank + 1],
}


def count_of(answer, group, counts, weight):
    return answer.all_reduce_token_count(counts, weight, group).value


DECLARATION = Declaration(
    inputs={
        "counts": Drawn(
            lambda rank, ranks, draw: list(DRAWN_COUNTS.values())[draw](rank),
            {description: number for number, description in enumerate(DRAWN_COUNTS) if number},
        ),
        "weight": Drawn(lambda rank, ranks, draw: (1.0, 0.25 * rank, 0.0)[draw], {"weights 0, 1/4, 1/2": 1, "0": 2}),
    },
    call=count_of,
    reference=lambda ranks, rank: float(sum(sum(each["counts"]) * each["weight"] for each in ranks)),
    replicas=True,
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any counts and weights, one call after the other, and a group of only some ranks; `counts` does not change."""
    check_conditions(DECLARATION, answer, world, network)
