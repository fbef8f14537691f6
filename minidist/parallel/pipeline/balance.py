"""Balance the layers over the pipeline stages: minimise the cost of the slowest stage, which sets the pace."""

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

from minidist.errors import UserError


def balance_layers(
    costs: Sequence[float], stages: int, chunks: int = 1, embedding: float = 0.0, head: float = 0.0
) -> list[range]:
    """Split the layers into `stages * chunks` consecutive, non-empty parts so that the costliest part costs least.

    costs: the cost of each layer, in any unit. embedding, head: additional cost of the first and the last part.
    Returns the layers of each part, from the input on (`Schedule.owner` gives the stage of each). Ties are broken by
    the smallest sum of squares, then by fewer layers in earlier parts, where 1F1B has most micro-batches in flight.

    Raises UserError if there are fewer layers than parts.
    """
    parts = stages * chunks
    if len(costs) < parts:
        each = f" x {chunks} chunks = {parts} parts" if chunks > 1 else ""
        fits = len(costs) // chunks
        fewer = f"take {fits} stage{'s' * (fits > 1)}, or " if fits else ""
        raise UserError(
            f"{stages} stages{each} need a layer each, and the model has {len(costs)}: {fewer}give it {parts} layers."
        )
    embedding, *costs, head = _whole([embedding, *costs, head])
    costs[0] += embedding
    costs[-1] += head
    ends = [0, *accumulate(costs)]
    largest, _ = _cut(ends, parts, lambda cost: cost, max)
    _, cuts = _cut(ends, parts, lambda cost: cost**2 if cost <= largest else math.inf, operator.add)
    return [range(first, end) for first, end in zip((0, *cuts), cuts, strict=False)]


def _whole(costs: Sequence[float]) -> list[int]:
    """Scale the costs to integers, so that sums are exact and ties are found."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _cut(
    ends: Sequence[int], parts: int, value: Callable[[int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Find the split into `parts` parts with the least combined value, by dynamic programming.

    ends: prefix sums of the costs. value: of one part's cost. join: combines two parts' values. Returns the value and
    the end of each part. The best split of i layers into k parts extends a best split of j < i layers into k - 1.
    """
    layers = len(ends) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for k in range(1, parts + 1):
        best = {
            i: min((join(so_far, value(ends[i] - ends[j])), (*cuts, i)) for j, (so_far, cuts) in best.items() if j < i)
            for i in range(k, layers + 1)
        }
    return best[layers]
