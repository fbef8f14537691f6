"""The slowest stage sets the pace: the solution, as it stands in minidist.parallel.pipeline.balance.

All stages work at the same time, so the time of a step is the time of the most expensive stage, times the number of
micro-batches: one layer too many on one stage slows down every step. The output head of a model with a large
vocabulary costs as much as several layers, so with equal numbers of layers all other stages wait for the last.

Enumerating all partitions is too slow from a few dozen layers on. The best partition of a prefix of the layers does
not depend on the layers after it, so dynamic programming works: a table of the best partitions of all prefixes, for
one more stage at a time. Costs are converted to integers first: 0.1 + 0.2 is not 0.3 in floating point, and rounding
would decide a tie.

Usual wrong answers:
* calls the package's function
* makes as many parts as stages
* gives one layer to every part and the rest to the last
* ignores the costs of embedding and head
* gives every part equally many layers, whatever their cost
* fills each part up to the mean cost, and the last part takes the rest
* returns any split with the smallest largest cost
* takes the first part's value as it is, without joining it to 0
* adds the head to the first part and the embedding to the last
* passes the arguments of join in the opposite order
* breaks ties by more layers in earlier parts
* minimizes the sum of squares only, not the largest cost
* rounds the costs to thousandths, so that small costs become 0 and close ones equal
* returns parts without layers
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
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for k in range(1, parts + 1):
        best = {
            i: min((join(so_far, value(ends[i] - ends[j])), (*cuts, i)) for j, (so_far, cuts) in best.items() if j < i)
            for i in range(k, layers + 1)
        }
    return best[layers]


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
