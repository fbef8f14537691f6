"""Which cases `minidist parity --ranks N` runs: every layout of N ranks, and the switches by a cover of their pairs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from minidist.errors import UserError
from minidist.tools.parity.cases import HALF, SWITCHES, Case
from minidist.tools.parity.cover import Family, Switches, covered, pairs, pairwise
from minidist.tools.parity.layouts import Layout, layouts
from minidist.validation import validate

# Every schedule meets every number of stages; it need not meet every mesh.
_APART = tuple(frozenset(names) for names in (("mesh", "schedule"), ("mesh", "stages")))


@dataclass(frozen=True)
class Part:
    """Some layouts, whose cases together have every pair of values that can be had.

    refused: what cannot be, and why, by name.
    """

    title: str
    layouts: frozenset[Layout]
    families: tuple[Family, ...]
    cases: tuple[Case, ...]
    refused: dict[str, str]

    @property
    def product(self) -> int:
        """How many combinations there are."""
        return sum(math.prod(map(len, family.switches.values())) for family in self.families)

    def coverage(self, cases: Iterable[Case]) -> tuple[int, int]:
        """How many of the pairs of values these cases have in them, and how many there are."""
        wanted = set().union(*(pairs(family.choices, _APART) for family in self.families))
        mine = self.of(cases)
        if len(mine) == self.product:  # every combination, so every pair
            return len(wanted), len(wanted)
        met = set().union(*(covered(_choice(case)) for case in mine))
        return len(wanted & met), len(wanted)

    def of(self, cases: Iterable[Case]) -> list[Case]:
        """Those of the cases that belong to this part, whether they are in its cover or not."""
        return [case for case in cases if case.plan in self.layouts]


@cache
def plan(ranks: int, full: bool = False) -> tuple[Part, ...]:
    """The parts of `minidist parity --ranks N`: one rank, data parallelism, and all other layouts of N ranks.

    Data parallelism, on which all others are built, has a cover of its own. With `full` every combination is a case.
    """
    parts = [_part("1 rank", 1, [Layout()], full)]
    if ranks > 1:
        plain = Layout(dp=ranks)
        others = [layout for layout in layouts(ranks) if layout != plain]
        parts.append(_part(f"dp={ranks}", ranks, [plain], full))
        parts.append(_part(f"all other layouts of {ranks} ranks", ranks, others, full))
    return tuple(parts)


def cases_of(parts: Iterable[Part]) -> list[Case]:
    """The cases of all parts, in the order in which they are run."""
    return [case for part in parts for case in part.cases]


def _part(title: str, ranks: int, among: Sequence[Layout], full: bool) -> Part:
    refused: dict[str, str] = {}
    families, layout_of = [], {}
    for layout in among:
        switches = switches_of(layout)
        why = {value: _refusal(layout, value) for value in switches["micro_batches"]}
        refused |= {f"{layout} micro-batches={value}": text for value, text in why.items() if text is not None}
        switches["micro_batches"] = tuple(value for value, text in why.items() if text is None)
        if switches["micro_batches"]:
            features = _features(layout) if len(among) > 1 else {}
            layout_of[tuple(features.values())] = layout
            families += [Family({**switches, **formats}, features) for formats in _formats(switches)]
    if full:
        chosen = [choice for family in families for choice in _product(family)]
    else:
        chosen = pairwise(families, ranks, apart=_APART)
    cases = []
    for choice in chosen:
        layout = layout_of[tuple(choice[name] for name in families[0].fixed)]
        cases.append(case_with(layout, {name: choice[name] for name in SWITCHES}))
    place = {layout: number for number, layout in enumerate(layout_of.values())}
    cases.sort(key=lambda case: place[case.plan])  # one mesh after the other
    return Part(title, frozenset(among), tuple(families), tuple(cases), refused)


def _formats(switches: Switches) -> list[Switches]:
    """One format of all numbers with every way of reducing gradients; two formats only where masters can be kept."""
    full = {"dtype": tuple(dtype for dtype in switches["dtype"] if dtype not in HALF)}
    half = {"dtype": HALF, "gradients": tuple(kind for kind in switches["gradients"] if kind != "naive")}
    return [full, half]


def _product(family: Family) -> Iterable[dict[str, Any]]:
    return (dict(zip(family.choices, values, strict=True)) for values in product(*family.choices.values()))


def _features(layout: Layout) -> dict[str, Any]:
    """What tells one layout from another."""
    return {
        "mesh": str(layout.mesh),
        "stages": layout.pp,
        "schedule": layout.schedule,
        "sequence": layout.sequence,
        "context": layout.context,
    }


def _choice(case: Case) -> dict[str, Any]:
    return _features(case.plan) | {name: getattr(case, name) for name in SWITCHES}


def case_with(layout: Layout, values: Mapping[str, Any]) -> Case:
    """The case of a layout with a value for every switch; its model has a layer, or two, for each part."""
    return Case(layout.mesh.world_size, max(2, layout.pp * layout.chunks), layout, **values)


def _refusal(layout: Layout, micro_batches: int) -> str | None:
    """Why a layout cannot run with that many micro-batches, None when it can."""
    plain = {name: values[0] for name, values in SWITCHES.items()}
    try:
        validate(case_with(layout, plain | {"micro_batches": micro_batches}).config(), layout.mesh.world_size)
    except UserError as error:
        return str(error)
    return None


def switches_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """The switches that mean something in a layout: one rank cannot differ from others, one replica shares nothing."""
    alone: dict[str, tuple[Any, ...]] = {}
    if layout.mesh.world_size == 1:
        alone["start"] = ("equal",)
    if layout.dp == 1:
        alone["shares"] = ("equal",)
    alone["gradients"] = tuple(kind for kind in SWITCHES["gradients"] if _shares(layout, kind))
    return {**SWITCHES, **alone}


def _shares(layout: Layout, gradients: str) -> bool:
    """Whether this way of reducing gradients is one of its own in a layout: shards need ranks, copies twice as many."""
    if gradients.endswith("hybrid"):
        return layout.dp % 2 == 0 and layout.dp * layout.cp > 2
    return not gradients.startswith("zero") or layout.dp * layout.cp > 1
