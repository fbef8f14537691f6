"""Which layers go to which stage: the slowest stage sets the pace, so it is made as fast as can be."""

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

from minidist.errors import UserError


def balance_layers(
    costs: Sequence[float], stages: int, chunks: int = 1, embedding: float = 0.0, head: float = 0.0
) -> list[range]:
    """Cut the layers into `stages * chunks` parts in a row, none empty, whose costliest is as cheap as possible.

    costs: what each layer costs, in any unit; embedding and head: what the first and the last part have besides.
    Returns the layers of every part, from the input on (`Schedule.owner` says where each is). Of several best cuts it
    takes the most even one, by the sum of squares, and of those the one with fewer layers in front, where 1F1B keeps
    most micro-batches alive.

    Raises UserError when there are fewer layers than parts.
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
    """The costs in a unit so small that all are whole, for sums of equal layers to be equal: floats would round."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _cut(
    ends: Sequence[int], parts: int, value: Callable[[int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least joined value of any cut into so many parts, and where its parts end. ends: costs summed up to there.

    The best cut of the first i layers into k parts is a best cut of the first j < i into k - 1, and one part more.
    """
    layers = len(ends) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for k in range(1, parts + 1):
        best = {
            i: min((join(so_far, value(ends[i] - ends[j])), (*cuts, i)) for j, (so_far, cuts) in best.items() if j < i)
            for i in range(k, layers + 1)
        }
    return best[layers]
