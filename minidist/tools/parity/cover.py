"""Pairwise covers: few cases in which every value of a switch occurs with every value of every other switch.

A switch is an option of a case, such as the optimizer. Most configuration bugs depend on one or two switches (Kuhn,
Wallace and Gallo 2004), so a pairwise cover finds nearly as many as the whole product, and its size grows with the
logarithm of the product.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Switches = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class CaseFamily:
    """A set of cases: all combinations of the possible values of their switches (options such as the optimizer).

    switches: the possible values of each switch, by name. fixed: properties that all cases of the family have in
    common, such as the mesh, by name.
    """

    switches: Switches
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, Sequence[Any]]:
        """The possible values of every switch and every fixed property, by name; a fixed property has one value."""
        return {**{name: (value,) for name, value in self.fixed.items()}, **self.switches}


def value_pairs(choices: Switches, excluded: Sequence[frozenset[str]] = ()) -> set[Pair]:
    """Return every pair of values of two different switches, each value as (switch name, value).

    choices: the possible values of each switch, by name. excluded: pairs of switch names that are left out.
    """
    names = [pair for pair in combinations(choices, 2) if frozenset(pair) not in excluded]
    return {((a, x), (b, y)) for a, b in names for x in choices[a] for y in choices[b]}


def value_pairs_in_case(case: Mapping[str, Any], excluded: Sequence[frozenset[str]] = ()) -> set[Pair]:
    """Return every pair of values of two different switches in one case. case: the value of each switch, by name.

    excluded: pairs of switch names that are left out.
    """
    return value_pairs({name: (value,) for name, value in case.items()}, excluded)


def pairwise_cover(
    families: Sequence[CaseFamily], seed: int = 0, candidates: int = 30, excluded: Sequence[frozenset[str]] = ()
) -> list[dict[str, Any]]:
    """Choose few cases that together contain every pair of values of two switches that some family allows.

    families: the sets of possible cases. Returns the value of each switch, by name, for each case; the same seed gives
    the same cases. Greedy, as in AETG (Cohen et al. 1997): each chosen case is the best of `candidates` cases, each of
    which is built, value by value, from a pair not yet covered. excluded: pairs of switch names whose values need not
    be combined.
    """
    draw = random.Random(seed)
    choices = [family.choices for family in families]
    missing: set[Pair] = set().union(*(value_pairs(family, excluded) for family in choices))
    cases = []
    while missing:
        in_order = sorted(missing, key=repr)
        grown = (_build_case(choices, missing, draw.choice(in_order), draw) for _ in range(candidates))
        best = max(grown, key=lambda case: len(value_pairs_in_case(case) & missing))
        cases.append(best)
        missing -= value_pairs_in_case(best)
    return cases


def _build_case(choices: Sequence[Switches], missing: set[Pair], first: Pair, draw: random.Random) -> dict[str, Any]:
    """Build a case from the pair `first`, value by value, each with the most pairs that are still missing.

    choices: the possible values of each switch, by family. draw: breaks ties.
    """
    pair = dict(first)
    able = [family for family in choices if all(value in family.get(name, ()) for name, value in pair.items())]
    family = draw.choice(able) if len(able) > 1 else able[0]
    order = list(family)
    chosen = pair | {name: values[0] for name, values in family.items() if len(values) == 1}
    rest = [name for name in order if name not in chosen]
    draw.shuffle(rest)
    for name in rest:
        values = list(family[name])
        draw.shuffle(values)  # so that equal gains do not always end in the first value

        def gain(value: Any, name: str = name) -> int:
            new_pairs = [((name, value), other) for other in chosen.items()]
            return sum(pair in missing or pair[::-1] in missing for pair in new_pairs)

        chosen[name] = max(values, key=gain)
    return {name: chosen[name] for name in order}
