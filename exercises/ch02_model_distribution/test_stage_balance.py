"""Tests of stage_balance: the reference enumerates every split, with exact fractions."""

import functools
import itertools
import math
import operator
import random
from fractions import Fraction

from exercises.testing import Wrong, expect, show, test

# costs, stages, chunks, embedding, head. Fractions are of powers of two, so that no rounding breaks a tie: answers may
# add and square floating-point numbers.
CASES = [
    ([1, 1, 1, 1], 2, 1, 0, 0),
    ([5, 1, 1, 1, 1], 2, 1, 0, 0),
    ([1, 2, 3, 4, 5, 6, 7], 3, 1, 0, 0),
    ([9, 1, 1, 1, 8, 1, 1], 4, 1, 0, 0),
    ([3, 3, 3], 3, 1, 0, 0),
    ([1, 7, 6, 7, 4, 5, 4], 3, 1, 0, 0),  # the most even cut has a costlier part than another
    ([2, 7, 1, 8, 2, 8], 1, 1, 3, 1),
]
ENDS = [
    ([1] * 8, 2, 1, 0, 3),
    ([1] * 8, 4, 1, 0, 3),
    ([1] * 8, 4, 1, 1.5, 2.5),
    ([0.125] * 9, 3, 1, 0.125, 0.25),
    ([2, 1, 1, 1, 1, 2], 3, 1, 2, 4),
]
TIED = [
    ([3, 5, 7, 2, 7, 2], 4, 1, 0, 0),  # cubes would choose another
    ([0, 0, 1, 0], 3, 1, 0, 0),
    ([1] * 7, 3, 1, 0, 0),
    ([4, 1, 1, 1, 1, 1], 3, 1, 0, 0),
    ([1, 1, 5, 1, 1, 1], 4, 1, 0, 0),
    ([0.125] * 7, 4, 1, 0, 0),
    ([6, 1, 1, 1, 1, 1, 1, 1], 4, 1, 0, 0),
]
NEAR_1 = 1 + 2**-13
CHUNKS = [
    ([1] * 8, 2, 2, 0, 2),
    ([1, 2, 3, 4, 3, 2, 1], 2, 3, 1, 0),
    ([0.75, 0.125, 0.125, 0.875, 0.25, 0.1875], 3, 2, 0, 0),
]


def cut(answer, costs, stages, chunks, embedding, head):
    """Return the (first, end) of every part; check that the parts cover all layers in order."""
    got = answer.balance_layers(costs, stages, chunks, embedding, head)
    if not isinstance(got, list) or not all(isinstance(part, range) for part in got):
        raise Wrong("type", "the parts have the wrong type", "a list of ranges", repr(got)[:80])
    expect("the number of parts", len(got), stages * chunks)
    expect("the layers of all parts, in order", [layer for part in got for layer in part], list(range(len(costs))))
    expect("parts without a layer", [number for number, part in enumerate(got) if not part], [])
    return [(part.start, part.stop) for part in got]


def prices(parts, costs, embedding, head):
    """Return the exact cost of every part."""
    totals = [sum(map(Fraction, costs[first:end])) for first, end in parts]
    totals[0] += Fraction(embedding)
    totals[-1] += Fraction(head)
    return totals


def best(costs, stages, chunks, embedding, head):
    """Return the best split: by the costliest part, then the sum of squares, then fewer layers in earlier parts."""
    inner = itertools.combinations(range(1, len(costs)), stages * chunks - 1)
    cuts = ([0, *ends, len(costs)] for ends in inner)
    every = [list(itertools.pairwise(ends)) for ends in cuts]

    def badness(parts):
        totals = prices(parts, costs, embedding, head)
        return max(totals), sum(map(operator.mul, totals, totals)), [end for _, end in parts]

    return min(every, key=badness)


def describe_case(costs, embedding, head):
    return f"layers cost {costs}, the embedding {embedding}, the head {head}"


def costliest_is_least(answer, cases):
    for costs, stages, chunks, embedding, head in cases:
        parts = cut(answer, costs, stages, chunks, embedding, head)
        got = max(prices(parts, costs, embedding, head))
        wanted = max(prices(best(costs, stages, chunks, embedding, head), costs, embedding, head))
        case = f"{describe_case(costs, embedding, head)}: {parts}"
        expect("the cost of the costliest part", float(got), float(wanted), case=case)


@test(points=3)
def smallest_largest_cost(answer):
    """The cost of the costliest part is the smallest possible."""
    costliest_is_least(answer, CASES)


@test(points=3)
def embedding_and_head_count(answer):
    """The embedding adds to the cost of the first part, the head to that of the last."""
    costliest_is_least(answer, ENDS)


@test(points=3)
def ties(answer):
    """Ties: the split with the smallest sum of squares, then fewer layers in earlier parts."""
    generator = random.Random(5)
    drawn = []
    for _ in range(60):
        unit = generator.choice((1, 1, 2**-30, 2**30))  # of time: seconds, about nanoseconds, ...
        costs = [unit * generator.choice((0, 1, 1, 2, 3, 0.125, 0.375, NEAR_1)) for _ in range(generator.randint(1, 7))]
        stages = generator.randint(1, min(4, len(costs)))
        embedding, head = unit * generator.choice((0, 0, 0.125, 2)), unit * generator.choice((0, 0, 0.375, 3))
        drawn.append((costs, stages, 1, embedding, head))
    for case in [*TIED, *CASES, *ENDS, *drawn]:
        costs, _, _, embedding, head = case
        expect("the layers of the parts", cut(answer, *case), best(*case), case=describe_case(costs, embedding, head))


@test(points=2)
def chunks_make_more_parts(answer):
    """With several chunks per stage there are stages x chunks parts."""
    for case in CHUNKS:
        costs, _, _, embedding, head = case
        expect("the layers of the parts", cut(answer, *case), best(*case), case=describe_case(costs, embedding, head))


@test(points=1)
def combined_values_of_parts(answer):
    """_cut finds the least combined value for any value and join, from the first part to the last one."""
    functions = (
        ("lambda cost: cost**2, lambda a, b: 2 * a + b", lambda cost: cost**2, lambda a, b: 2 * a + b),
        ("lambda cost: cost**2, lambda a, b: max(a, b) + 1", lambda cost: cost**2, lambda a, b: max(a, b) + 1),
        (
            "lambda cost: min(cost, 4), operator.add",
            lambda cost: min(cost, 4),
            operator.add,
        ),  # empty parts would be best
        ("lambda cost: -cost, max", lambda cost: -cost, max),  # no value is less than the 0 at the start
        (
            "lambda cost: cost if cost < 6 else math.inf, operator.add",
            lambda cost: cost if cost < 6 else math.inf,
            operator.add,
        ),
        ("lambda cost: cost**2, lambda a, b: min(a + b, 9)", lambda cost: cost**2, lambda a, b: min(a + b, 9)),
    )
    for costs, parts in (([4, 2], 1), ([2, 7, 1, 1], 2), ([1, 5, 1], 3), ([0, 2, 0, 3], 3), ([3, 1, 2, 5, 1], 3)):
        ends = [0, *itertools.accumulate(costs)]
        partitions = [(*inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), parts - 1)]
        for text, value, join in functions:
            combined = {}
            for cuts in partitions:
                totals = [ends[end] - ends[first] for first, end in itertools.pairwise((0, *cuts))]
                combined[cuts] = functools.reduce(join, map(value, totals), 0)
            case = f"_cut({ends}, {parts}, {text})"
            got = answer._cut(list(ends), parts, value, join)
            if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], tuple)):
                raise Wrong(
                    "type", "what _cut returns", "a value and a tuple of the ends of the parts", show(got), case
                )
            least = min(combined.values())
            expect("the least combined value", got[0], least, case=case)
            expect("the combined value of the parts with the returned ends", combined.get(got[1]), least, case=case)


@test(points=2)
def many_layers(answer):
    """100 layers on 8 stages finish quickly: the splits are not enumerated."""
    costs = [1 + (7 * layer) % 5 for layer in range(100)]  # 300 in all
    parts = cut(answer, costs, 8, 1, 4, 12)
    # 316 / 8 = 39.5, and sums of whole costs: none is cheaper than 40 at its costliest.
    got = max(prices(parts, costs, 4, 12))
    expect("the cost of the costliest of 8 parts", float(got), float(least_limit(costs, 8, 4, 12)))


def least_limit(costs, parts, embedding, head):
    """Return the smallest limit for which greedy filling needs at most the given number of parts."""
    costs = [costs[0] + embedding, *costs[1:-1], costs[-1] + head]
    for limit in itertools.count(max(costs)):
        needed, filled = 1, 0
        for cost in costs:
            if filled + cost > limit:
                needed, filled = needed + 1, 0
            filled += cost
        if needed <= parts:
            return limit
