"""Few cases that cover all pairs: every value of a switch meets every value of every other switch at least once.

Most faults of configuration need one or two switches to show (Kuhn, Wallace and Gallo 2004), so a pairwise cover finds
nearly what the whole product would, with a number of cases that grows with its logarithm.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(switches: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair of values of two different switches."""
    return {((a, x), (b, y)) for a, b in combinations(switches, 2) for x, y in product(switches[a], switches[b])}


def covered(case: Mapping[str, Any]) -> set[Pair]:
    """The pairs that one case has in it."""
    return {((a, case[a]), (b, case[b])) for a, b in combinations(case, 2)}


def pairwise(switches: Mapping[str, Sequence[Any]], seed: int = 0, candidates: int = 30) -> list[dict[str, Any]]:
    """Cases that together contain every pair; the same ones for the same seed. Greedy, as in AETG (Cohen et al. 1997).

    Each case is the best of some that are grown from a pair still missing, value by value.
    """
    draw = random.Random(seed)
    missing = pairs(switches)
    cases = []
    while missing:
        best = max((_grow(switches, missing, draw) for _ in range(candidates)), key=lambda c: len(covered(c) & missing))
        cases.append(best)
        missing -= covered(best)
    return cases


def _grow(switches: Mapping[str, Sequence[Any]], missing: set[Pair], draw: random.Random) -> dict[str, Any]:
    order = list(switches)
    chosen = dict(draw.choice(sorted(missing, key=repr)))
    rest = [name for name in order if name not in chosen]
    draw.shuffle(rest)
    for name in rest:
        values = list(switches[name])
        draw.shuffle(values)  # so that equal gains do not always end in the first value

        def gain(value: Any, name: str = name) -> int:
            trial = {**chosen, name: value}
            ordered = {key: trial[key] for key in order if key in trial}
            return len(covered(ordered) & missing)

        chosen[name] = max(values, key=gain)
    return {name: chosen[name] for name in order}
