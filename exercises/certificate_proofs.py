"""What the certificate proves: layouts with the learner's functions that equal one process, and a live repair.

The hybrid layout comes first. Then smaller layouts run until every function of the learner has been called; which
layout calls which is counted (layouts.toml), and every call that the certificate reports is counted again.
"""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exercises.layouts import ENGINE, LAYOUTS, MIN_RANKS, RESUMED, SMALL_MODEL, layout_options, train_each
from exercises.learner_pieces import LearnerPiece
from exercises.parity import make_case_like, run_parity
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer
    from minidist.tools.parity.cases import Case

# The hybrid layout by the number of ranks: pipeline, data and tensor parallelism, as many of them as there is room for.
HYBRID = {
    2: "--mesh.dp 2",
    4: "--mesh.pp 2 --mesh.dp 1 --mesh.tp 2 --parallel.sequence --parallel.schedule 1f1b --train.micro-batches 4",
    8: "--mesh.pp 2 --mesh.dp 2 --mesh.tp 2 --parallel.sequence --parallel.schedule 1f1b --train.micro-batches 4",
}
_HYBRID_NAME, _REPAIR = "hybrid", "repair"
_COVER_RANKS = 4  # of the smaller layouts, at most
_REPAIR_STEPS, _REPAIR_DEADLINE_S = 3, 240.0


def hybrid_options(ranks: int) -> list[str]:
    """Return the options of the hybrid layout on `ranks` ranks. Raises UserError for another number than in HYBRID."""
    if ranks not in HYBRID:
        raise UserError(f"--ranks {ranks}: the certificate's layout has {', '.join(map(str, HYBRID))} ranks")
    return HYBRID[ranks].split()


def prove_layouts(
    pieces: Sequence[LearnerPiece],
    ranks: int,
    layouts: Mapping[str, Collection[str]],
    resumed: Collection[str],
    server: "RankServer",
) -> Iterator[dict[str, Any]]:
    """Compare the hybrid layout and a cover of smaller ones with one process; yield a record of each as it ends.

    layouts: the names of the exercises that each layout calls. resumed: those that only a resumed run calls. A record
    has the case's name, its ranks and dtypes, the largest relative differences, their tolerances, `ok` and the calls of
    each piece by rank; `reason` says why it is not ok.
    """
    first = _make_case([*ENGINE, *hybrid_options(ranks)], ranks)
    called: set[str] = set()
    for case, row in run_parity(pieces, [first], server):
        record = _make_record(_HYBRID_NAME, case, row)
        called |= set(record["calls"])
        yield record
    # A run that resumes saves a checkpoint, too. It comes first, so it is chosen where layouts call equally many.
    possible = {RESUMED: (*layouts["bucketed"], *resumed), **layouts}
    names = choose_cover({piece.name for piece in pieces} - called, possible)
    cases = {_make_cover_case(name, min(ranks, _COVER_RANKS)): name for name in names}
    if cases:
        for case, row in run_parity(pieces, list(cases), server):
            yield _make_record(cases[case], case, row)


def choose_cover(exercises: Collection[str], layouts: Mapping[str, Collection[str]]) -> list[str]:
    """Return layouts that together call all of these exercises, as far as any layout of parity does.

    Each next layout calls most of the exercises that are left. The repair of replicas is a run of its own.
    """
    left, chosen = set(exercises), []
    possible = {name: set(called) for name, called in layouts.items() if name != _REPAIR}
    while True:
        name = max(possible, key=lambda name: len(left & possible[name]), default=None)
        if name is None or not left & possible[name]:
            return chosen
        chosen.append(name)
        left -= possible[name]


def _make_case(options: Sequence[str], ranks: int) -> "Case":
    """Return the parity case of a run of the simple trainer with these options."""
    from minidist.tools.cli import parse_train_options

    return make_case_like(parse_train_options(list(options))[0], ranks)


def _make_cover_case(name: str, ranks: int) -> "Case":
    """Return the parity case of a layout in layouts.toml, or of a run that resumes."""
    is_resumed = name == RESUMED
    options = layout_options("bucketed" if is_resumed else name, ranks)
    return replace(_make_case([*ENGINE, *options], ranks), resume=is_resumed)


def _make_record(name: str, case: "Case", row: dict | str) -> dict[str, Any]:
    """Return the record of a case. row: of the parity table, or the reason why the case failed."""
    record = {
        "name": name,
        "layout": case.description.removesuffix(" engine=simple"),
        "ranks": case.world_size,
        "dtype": case.dtype,
        "reference_dtype": case.reference_case.dtype,
        "optimizer": case.optimizer,
        "how": "observed",
    }
    if isinstance(row, str):
        return {**record, "ok": False, "reason": row, "differences": {}, "tolerance": {}, "calls": {}}
    differences = {kind: _finite(row[f"{kind}_diff"]) for kind in ("loss", "grad", "grad_norm", "param")}
    calls: dict[str, list[int]] = {}
    for rank, counted in enumerate(row["calls"]):
        for piece, number in counted.items():
            calls.setdefault(piece, [0] * case.world_size)[rank] = number
    return {
        **record,
        "ok": row["ok"],
        "reason": row["first_wrong"],
        "differences": differences,
        "tolerance": row["tolerance"],
        "calls": calls,
    }


def _finite(difference: float | None) -> float | None:
    """Return the difference; if it is infinite, the largest number that JSON can write."""
    return sys.float_info.max if difference == math.inf else difference


def repair_flipped_bit(pieces: Sequence[LearnerPiece], server: "RankServer", folder: Path) -> dict[str, Any]:
    """Train twice on three ranks, the second time with a flipped bit that is repaired live; return what was observed.

    The record is ok if the run reported the repair and every loss equals that of the undisturbed run, bit by bit.
    """
    from minidist.tools.cli import parse_train_options

    ranks, flip = MIN_RANKS[_REPAIR], layout_options(_REPAIR, MIN_RANKS[_REPAIR])
    options = [*ENGINE, *SMALL_MODEL, "--train.steps", str(_REPAIR_STEPS), "--train.log-every", "1"]
    folders = [folder / "undisturbed", folder / "repaired"]
    argv = [[*options, "--mesh.dp", str(ranks)], [*options, *flip]]
    configs = [
        parse_train_options([*words, "--folder", str(path)])[0] for words, path in zip(argv, folders, strict=True)
    ]
    record = {"layout": f"dp={ranks}", "ranks": ranks, "fault": LAYOUTS[_REPAIR].split("'")[1], "how": "observed"}
    try:
        by_rank = server.run(train_each, ranks, (configs, pieces), threads=1, deadline_s=_REPAIR_DEADLINE_S).values
    except (RunError, UserError) as error:
        return {**record, "ok": False, "reason": str(error), "calls": {}}
    note = next((line for line in by_rank[0][1][1].splitlines() if "Repaired from the others" in line), "")
    undisturbed, repaired = (_read_losses(path / "metrics.jsonl") for path in folders)
    is_equal = undisturbed == repaired and len(repaired) > _REPAIR_STEPS
    calls = [runs[1][0] for runs in by_rank]
    return {
        **record,
        "ok": bool(note) and is_equal,
        "reason": "no repair was reported" if not note else "" if is_equal else "the losses after the repair differ",
        "note": note.strip(),
        "losses": repaired,
        "undisturbed_losses": undisturbed,
        "calls": {piece.name: [of_rank.get(piece.name, 0) for of_rank in calls] for piece in pieces},
    }


def _read_losses(file: Path) -> list[float]:
    """Return all losses in a metrics.jsonl: of each step, and of the held-out text."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "held_out_loss") if row.get(key) is not None]
