"""The cases of `minidist parity --ranks N`: every layout of N ranks, with a pairwise cover of the switches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from minidist.errors import UserError
from minidist.tools.parity.cases import HALF, SWITCHES, Case
from minidist.tools.parity.cover import CaseFamily, Switches, pairs_in_case, pairwise_cover, value_pairs
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.validation import validate

# Every schedule occurs with every number of stages, but not with every mesh.
_APART = tuple(frozenset(names) for names in (("mesh", "schedule"), ("mesh", "stages")))


@dataclass(frozen=True)
class PlanPart:
    """A group of layouts whose cases together have every possible pair of values.

    refused: combinations that cannot run, with the reason.
    """

    title: str
    layouts: frozenset[Layout]
    families: tuple[CaseFamily, ...]
    cases: tuple[Case, ...]
    refused: dict[str, str]

    @property
    def product(self) -> int:
        """The number of all combinations."""
        return sum(math.prod(map(len, family.switches.values())) for family in self.families)

    def coverage(self, cases: Iterable[Case]) -> tuple[int, int]:
        """(pairs of values that occur in these cases, all pairs)."""
        wanted = set().union(*(value_pairs(family.choices, _APART) for family in self.families))
        mine = self.select(cases)
        if len(mine) == self.product:  # every combination, so every pair
            return len(wanted), len(wanted)
        met = set().union(*(pairs_in_case(_choice(case)) for case in mine))
        return len(wanted & met), len(wanted)

    def select(self, cases: Iterable[Case]) -> list[Case]:
        """The cases that belong to this part, whether they are in its cover or not."""
        return [case for case in cases if case.mesh_layout in self.layouts]


@cache
def plan_cases(ranks: int, full: bool = False) -> tuple[PlanPart, ...]:
    """The plan in three parts: one rank, pure data parallelism, and all other layouts of N ranks.

    Data parallelism, on which the others build, has a cover of its own. With `full` every combination is a case.
    """
    parts = [_part("1 rank", 1, [Layout()], full)]
    if ranks > 1:
        plain = Layout(dp=ranks)
        others = [layout for layout in list_layouts(ranks) if layout != plain]
        parts.append(_part(f"dp={ranks}", ranks, [plain], full))
        parts.append(_part(f"all other layouts of {ranks} ranks", ranks, others, full))
    return tuple(parts)


def list_cases(parts: Iterable[PlanPart]) -> list[Case]:
    """The cases of all parts, in the order in which they run."""
    return [case for part in parts for case in part.cases]


def _part(title: str, ranks: int, among: Sequence[Layout], full: bool) -> PlanPart:
    refused: dict[str, str] = {}
    families, layout_of = [], {}
    for layout in among:
        switches = possible_switches(layout)
        why = {value: _refusal(layout, value) for value in switches["micro_batches"]}
        refused |= {f"{layout} micro-batches={value}": text for value, text in why.items() if text is not None}
        switches["micro_batches"] = tuple(value for value, text in why.items() if text is None)
        if switches["micro_batches"]:
            features = _features(layout) if len(among) > 1 else {}
            layout_of[tuple(features.values())] = layout
            families += [CaseFamily({**switches, **formats}, features) for formats in _formats(switches)]
    if full:
        chosen = [choice for family in families for choice in _product(family)]
    else:
        chosen = pairwise_cover(families, ranks, apart=_APART)
    cases = []
    for choice in chosen:
        layout = layout_of[tuple(choice[name] for name in families[0].fixed)]
        cases.append(make_case(layout, {name: choice[name] for name in SWITCHES}))
    place = {layout: number for number, layout in enumerate(layout_of.values())}
    cases.sort(key=lambda case: place[case.mesh_layout])  # one mesh after the other
    return PlanPart(title, frozenset(among), tuple(families), tuple(cases), refused)


def _formats(switches: Switches) -> list[Switches]:
    """Full-precision dtypes with every gradient reduction; 16-bit dtypes only with those that can keep masters."""
    full = {"dtype": tuple(dtype for dtype in switches["dtype"] if dtype not in HALF)}
    half = {"dtype": HALF, "gradients": tuple(kind for kind in switches["gradients"] if kind != "naive")}
    return [full, half]


def _product(family: CaseFamily) -> Iterable[dict[str, Any]]:
    return (dict(zip(family.choices, values, strict=True)) for values in product(*family.choices.values()))


def _features(layout: Layout) -> dict[str, Any]:
    """The features that distinguish layouts."""
    return {
        "mesh": str(layout.mesh),
        "stages": layout.pp,
        "schedule": layout.schedule,
        "sequence": layout.sequence,
        "context": layout.context,
    }


def _choice(case: Case) -> dict[str, Any]:
    return _features(case.mesh_layout) | {name: getattr(case, name) for name in SWITCHES}


def make_case(layout: Layout, values: Mapping[str, Any]) -> Case:
    """The case of a layout with the given switch values; its model has a layer per model chunk, and at least two."""
    return Case(layout.mesh.world_size, max(2, layout.pp * layout.chunks), layout, **values)


def _refusal(layout: Layout, micro_batches: int) -> str | None:
    """Why a layout cannot run with that many micro-batches; None if it can."""
    plain = {name: values[0] for name, values in SWITCHES.items()}
    try:
        validate(make_case(layout, plain | {"micro_batches": micro_batches}).config(), layout.mesh.world_size)
    except UserError as error:
        return str(error)
    return None


def possible_switches(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """The switch values that make a difference in a layout: one rank cannot start
    different from others, one replica has no shares."""
    alone: dict[str, tuple[Any, ...]] = {}
    if layout.mesh.world_size == 1:
        alone["start"] = ("equal",)
    if layout.dp == 1:
        alone["shares"] = ("equal",)
    alone["gradients"] = tuple(kind for kind in SWITCHES["gradients"] if _shares(layout, kind))
    return {**SWITCHES, **alone}


def _shares(layout: Layout, gradients: str) -> bool:
    """Whether this gradient reduction differs from the others in a layout: sharding needs several ranks,
    hybrid sharding more than two."""
    if gradients.endswith("hybrid"):
        return layout.dp % 2 == 0 and layout.dp * layout.cp > 2
    return not gradients.startswith("zero") or layout.dp * layout.cp > 1
