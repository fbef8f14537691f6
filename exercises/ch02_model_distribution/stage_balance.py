"""The slowest stage sets the pace.

Optional: dynamic programming, and nothing about distributed training. Divide the layers of a model among pipeline
stages so that the slowest stage is as fast as possible; of the best partitions, choose the most even one.

balance_layers: costs has one number per layer; embedding and head are added to the first and the last part. Returns a
range of layer numbers for each of the `stages * chunks` parts, consecutive and not empty. Among partitions whose
costliest part costs least it returns the one with the least sum of squared costs, then the one with fewer layers in
earlier parts. _cut, which balance_layers calls, finds a partition into `parts` non-empty parts whose combined value is
least, any of several. Parts of the costs c1, c2, c3 have the value join(join(join(0, value(c1)), value(c2)),
value(c3)); join(a, b) never falls as a grows. ends: the sums of the first 0, 1, 2, ... costs. Returns the combined
value and a tuple of the ends of the parts, as layer numbers.
Example: balance_layers([1, 1, 1, 1], 2, head=2) gives [range(0, 3), range(3, 4)], since both parts then cost 3.
    _cut([0, 1, 3, 6], 2, lambda cost: cost, max) gives (3, (2, 3)): the costs 1, 2 | 3.

Checked: against all partitions of small cases, with embedding and head, ties and chunks, of costs that floating-point
numbers add and square without rounding; _cut with another join; and that 100 layers on 8 stages take less than a few
seconds.

You may call:
    _whole(costs)   the costs scaled to integers, so that sums are exact and ties are found
    _cut(ends, parts, value, join)   in balance_layers; itertools.accumulate(costs)   sums of the first 1, 2, ... costs
    min(pairs)   compares tuples by their first element, then by the second; operator.add(a, b), max(a, b)

Check it with: python -m exercises check stage_balance

Stub a9ebe8f0.
"""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from minidist.errors import UserError
from minidist.parallel.pipeline.balance import _whole


def _cut(
    ends: Sequence[int], parts: int, value: Callable[[int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Find the split into `parts` parts with the least combined value, by dynamic programming.

    ends: prefix sums of the costs. value: of one part's cost. join: combines two parts' values. Returns the value and
    the end of each part. The best split of i layers into k parts extends a best split of j < i layers into k - 1.
    """
    layers = len(ends) - 1
    raise NotImplementedError("return the smallest joined value, and where the stages of that partition end")


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
    raise NotImplementedError("find where the stages of the best partition end: `cuts`")
    return [range(first, end) for first, end in zip((0, *cuts), cuts, strict=False)]
