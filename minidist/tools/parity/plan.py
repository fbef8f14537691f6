"""The cases of `minidist parity --ranks N`: every layout of N ranks, with a pairwise cover of the switches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

from minidist.errors import UserError
from minidist.tools.parity.cases import ALGORITHMS, HALF, MODES, SWITCHES, WITH_OWN_GRADIENTS, Case
from minidist.tools.parity.cover import CaseFamily, Switches, pairwise_cover, value_pairs, value_pairs_in_case
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.validation import validate

# Every schedule occurs with every number of stages, but not with every mesh.
_APART = tuple(frozenset(names) for names in (("mesh", "schedule"), ("mesh", "stages")))

# With the synchronization modes in which a rank has its own gradients: clipping would be by a rank's own norm.
_ALONE = {"optimizer": ("sgd",), "clip": (False,), "resume": (False,), "recompute": ("none",)}


@dataclass(frozen=True)
class PlanPart:
    """A part of the parity plan: some layouts, and cases on them that cover every pair of switch values.

    A switch is an option of a case, such as the optimizer (SWITCHES).
    title: the part's title in the printed plan. layouts: in the order in which their cases run. families: the possible
    switch values of each layout. ranks: the number of ranks of every layout. full: whether every combination is a case.
    refused: the reason why a combination of layout and switch value cannot run, by the combination's description.
    """

    title: str
    layouts: tuple[Layout, ...]
    families: tuple[CaseFamily, ...]
    ranks: int
    full: bool
    refused: dict[str, str]

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """The cases to run in this part, ordered by layout. They are computed on first use, which takes seconds."""
        if self.full:
            chosen = [choice for family in self.families for choice in _list_combinations(family)]
        else:
            chosen = pairwise_cover(self.families, self.ranks, excluded=_APART)
        fixed = tuple(self.families[0].fixed)  # no feature if there is only one layout
        layouts = {tuple(_layout_features(layout)[name] for name in fixed): layout for layout in self.layouts}
        cases = [
            make_case(layouts[tuple(choice[name] for name in fixed)], {name: choice[name] for name in SWITCHES})
            for choice in chosen
        ]
        return tuple(sorted(cases, key=lambda case: self.layouts.index(case.mesh_layout)))

    @property
    def num_combinations(self) -> int:
        """The number of all combinations of layouts and switch values in this part of the plan."""
        return sum(math.prod(map(len, family.switches.values())) for family in self.families)

    def count_covered_pairs(self, cases: Iterable[Case]) -> tuple[int, int]:
        """Return how many pairs of values of two switches are in `cases`, and how many are possible in this part."""
        pairs = set().union(*(value_pairs(family.choices, _APART) for family in self.families))
        selected = self.filter_cases(cases)
        if len(selected) == self.num_combinations:  # every combination, so every pair
            return len(pairs), len(pairs)
        covered = set().union(*(value_pairs_in_case(_feature_values(case)) for case in selected))
        return len(pairs & covered), len(pairs)

    def filter_cases(self, cases: Iterable[Case]) -> list[Case]:
        """Return the given cases whose layout belongs to this part of the plan."""
        return [case for case in cases if case.mesh_layout in self.layouts]


@cache
def plan_cases(ranks: int, full: bool = False, engine: str | None = None) -> tuple[PlanPart, ...]:
    """Plan the parity cases of `minidist parity --ranks N`, N being `ranks`, in three parts (with one rank, only one).

    The parts: one rank; N ranks with pure data parallelism; all other layouts of N ranks. A switch is an option of a
    case, such as the optimizer (`SWITCHES`). In each part, for any two switches, every possible combination of their
    values occurs in some case. full: every possible combination of layout and values of all switches is a case. engine:
    only cases of this engine; None: of all engines.
    """
    parts = [_make_plan_part("1 rank", 1, [Layout()], full, engine)]
    if ranks > 1:
        plain = Layout(dp=ranks)
        others = [layout for layout in list_layouts(ranks) if layout != plain]
        parts.append(_make_plan_part(f"dp={ranks}", ranks, [plain], full, engine))
        parts.append(_make_plan_part(f"all other layouts of {ranks} ranks", ranks, others, full, engine))
    parts = tuple(part for part in parts if part.families)
    if not parts:
        raise UserError(f"--engine {engine} has no rows on {ranks} rank: give --ranks 2 or more.")
    return parts


def list_cases(parts: Iterable[PlanPart]) -> list[Case]:
    """Return the cases of all parts, in the order in which they run."""
    return [case for part in parts for case in part.cases]


def _make_plan_part(title: str, ranks: int, layouts: Sequence[Layout], full: bool, engine: str | None) -> PlanPart:
    """Make a part of the plan from its layouts: find the combinations that can run, and those that are refused."""
    refused: dict[str, str] = {}
    families = []
    for layout in layouts:
        switches = possible_switch_values(layout)
        why = {value: _explain_refusal(layout, micro_batches=value) for value in switches["micro_batches"]}
        refused |= {f"{layout} micro-batches={value}": text for value, text in why.items() if text is not None}
        switches["micro_batches"] = tuple(value for value, text in why.items() if text is None)
        if switches["micro_batches"]:
            features = _layout_features(layout) if len(layouts) > 1 else {}
            restricted = _restrict_gradients(layout, switches)
            families += [
                CaseFamily({**switches, **values}, features)
                for values in restricted
                if engine in (None, *values["engine"])
            ]
    return PlanPart(title, tuple(layouts), tuple(families), ranks, full, refused)


def _restrict_gradients(layout: Layout, switches: Switches) -> list[Switches]:
    """Return the families of switch values that go together in a layout: dtypes, gradient reductions, engines.

    Full-precision dtypes go with every reduction, 16-bit dtypes only with those that can keep masters. The
    synchronization modes in which a rank has its own gradients go with SGD, without clipping, which would be by a
    rank's own norm; their resumption is tested elsewhere.
    """
    full = tuple(dtype for dtype in switches["dtype"] if dtype not in HALF)
    reductions = tuple(kind for kind in switches["gradients"] if kind not in (*WITH_OWN_GRADIENTS, *ALGORITHMS))
    kinds = tuple(kind for kind in reductions if kind not in ("naive", "central"))
    families = [
        {"dtype": full, "gradients": reductions, "engine": ("fast",)},
        {"dtype": HALF, "gradients": kinds, "engine": ("fast",)},
    ]
    if modes := tuple(kind for kind in switches["gradients"] if kind in WITH_OWN_GRADIENTS):
        families.append({"dtype": full, "gradients": modes, "engine": ("fast",), **_ALONE})
    if "simple" in switches["engine"]:
        families += _simple_families(layout, switches)
    return families


def _simple_families(layout: Layout, switches: Switches) -> list[Switches]:
    """Return the families of switch values that the simple engine runs in a layout; [] if none.

    The all-reduce algorithms go with one value of each other switch.
    """
    engine = {"engine": "simple", "micro_batches": switches["micro_batches"][-1]}
    if _explain_refusal(layout, **engine) is not None:
        return []
    accepted = {
        name: tuple(value for value in values if _explain_refusal(layout, **{**engine, name: value}) is None)
        for name, values in switches.items()
        if name not in engine
    }
    full = tuple(dtype for dtype in accepted["dtype"] if dtype not in HALF)
    reductions = tuple(kind for kind in accepted["gradients"] if kind not in (*WITH_OWN_GRADIENTS, *ALGORITHMS))
    families = [
        {**accepted, "engine": ("simple",), "gradients": reductions, "dtype": full},
        {
            **accepted,
            "engine": ("simple",),
            "gradients": tuple(kind for kind in reductions if kind != "naive"),
            "dtype": HALF,
        },
    ]
    if modes := tuple(kind for kind in accepted["gradients"] if kind in WITH_OWN_GRADIENTS):
        families.append({**families[0], "gradients": modes, **_ALONE})
    if algorithms := tuple(kind for kind in accepted["gradients"] if kind in ALGORITHMS):
        defaults = {name: values[:1] for name, values in accepted.items()}
        micro_batches = switches["micro_batches"][-1:]
        families.append({**defaults, "engine": ("simple",), "gradients": algorithms, "micro_batches": micro_batches})
    return families


def _list_combinations(family: CaseFamily) -> Iterable[dict[str, Any]]:
    """Return every combination of the family's values, by switch."""
    return (dict(zip(family.choices, values, strict=True)) for values in product(*family.choices.values()))


def _layout_features(layout: Layout) -> dict[str, Any]:
    """Return the properties of a layout whose pairs with switch values the plan covers, by name."""
    return {
        "mesh": str(layout.mesh),
        "stages": layout.pp,
        "schedule": layout.schedule,
        "sequence": layout.sequence,
        "context": layout.context,
    }


def _feature_values(case: Case) -> dict[str, Any]:
    """Return the value of each feature of the case's layout and of each switch, by name."""
    return _layout_features(case.mesh_layout) | {name: getattr(case, name) for name in SWITCHES}


def make_case(layout: Layout, values: Mapping[str, Any]) -> Case:
    """Make the parity case with this layout and these values of the switches (options of a case), by name.

    Its model has one layer per model chunk, but at least two.
    """
    return Case(layout.mesh.world_size, max(2, layout.pp * layout.chunks_per_stage), layout, **values)


def _explain_refusal(layout: Layout, **values: Any) -> str | None:
    """Return why a layout cannot run with these values of some switches; None if it can."""
    plain = {name: values[0] for name, values in SWITCHES.items()}
    try:
        validate(make_case(layout, plain | values).config(), layout.mesh.world_size)
    except UserError as error:
        return str(error)
    return None


def possible_switch_values(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Return the values that make a difference in this layout, for each switch (option of a case), by name.

    A single rank cannot start with parameters different from others; a single replica has no batch shares.
    """
    restricted: dict[str, tuple[Any, ...]] = {}
    if layout.mesh.world_size == 1:
        restricted |= {"start": ("equal",), "engine": ("fast", "simple")}
    if layout.dp == 1:
        restricted["shares"] = ("equal",)
    restricted["gradients"] = tuple(kind for kind in SWITCHES["gradients"] if _is_distinct(layout, kind))
    return {**SWITCHES, **restricted}


def _is_distinct(layout: Layout, gradients: str) -> bool:
    """Return whether a gradient reduction differs from the others in a layout.

    Sharding needs several ranks, hybrid sharding more than two; the synchronization modes and all-reduce algorithms
    need a layout with data parallelism alone.
    """
    if gradients == "asynchronous":  # several ranks train another way
        return layout.mesh.world_size == 1
    if gradients in (*MODES, *ALGORITHMS):
        is_mean = gradients != "gossip" or layout.dp <= 3
        return 1 < layout.dp == layout.mesh.world_size and is_mean
    if gradients.endswith("hybrid"):
        return layout.dp % 2 == 0 and layout.dp * layout.cp > 2
    return not gradients.startswith("zero") or layout.dp * layout.cp > 1
