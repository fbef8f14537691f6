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
    """Cases with the same features (properties of their layout, such as the mesh) and the same possible switch values.

    fixed: the value of each feature, by name; switches: the possible values of each switch, by name.
    """

    switches: Switches
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, Sequence[Any]]:
        """The possible values of every feature and switch; a feature has one."""
        return {**{name: (value,) for name, value in self.fixed.items()}, **self.switches}


def value_pairs(choices: Switches, apart: Sequence[frozenset[str]] = ()) -> set[Pair]:
    """Return every pair of values of two different switches.

    choices: the possible values of each switch, by name. apart: pairs of switch names that are left out.
    """
    names = [pair for pair in combinations(choices, 2) if frozenset(pair) not in apart]
    return {((a, x), (b, y)) for a, b in names for x in choices[a] for y in choices[b]}


def value_pairs_in_case(case: Mapping[str, Any], apart: Sequence[frozenset[str]] = ()) -> set[Pair]:
    """Return the pairs of values in one case, given its value of each switch. apart: as in `value_pairs`."""
    return value_pairs({name: (value,) for name, value in case.items()}, apart)


def pairwise_cover(
    families: Sequence[CaseFamily], seed: int = 0, candidates: int = 30, apart: Sequence[frozenset[str]] = ()
) -> list[dict[str, Any]]:
    """Return cases that together contain every pair of values that a family allows; the same seed gives the same cases.

    Greedy, as in AETG (Cohen et al. 1997): each case is the best of several candidates, each grown value by value from
    a missing pair. candidates: how many are tried per case. apart: pairs of switch names whose values need not be
    combined.
    """
    draw = random.Random(seed)
    choices = [family.choices for family in families]
    missing: set[Pair] = set().union(*(value_pairs(family, apart) for family in choices))
    cases = []
    while missing:
        in_order = sorted(missing, key=repr)
        grown = (_grow(choices, missing, draw.choice(in_order), draw) for _ in range(candidates))
        best = max(grown, key=lambda case: len(value_pairs_in_case(case) & missing))
        cases.append(best)
        missing -= value_pairs_in_case(best)
    return cases


def _grow(choices: Sequence[Switches], missing: set[Pair], first: Pair, draw: random.Random) -> dict[str, Any]:
    """Return a case with the pair `first` and, value by value, the most missing pairs."""
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
