"""The slowest stage sets the pace.

Write the missing lines of _cut and balance_layers; their docstrings specify the results.
You may call: _whole, _cut, min, max, operator.add, itertools.accumulate.
Check it with: python -m exercises check stage_balance

Stub 914533da.
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
    """Split the layers into `stages * chunks` consecutive non-empty parts, minimising the cost of the costliest part.

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
