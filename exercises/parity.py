"""Parity with the learner's code: layouts of the simple trainer with it, each compared with one process.

The tests of an exercise call its function by itself. Here it is installed in place of the package's code, and the
trainer runs with it: several steps, uneven batches, tied embeddings, 16-bit parameters, ZeRO, pipelines, resumption.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exercises.catalogue import Exercise
from exercises.layouts import ENGINE, MIN_RANKS, layout_options, layouts_that_call, read_layouts, read_resumed
from exercises.learner_pieces import LearnerPiece, install_pieces
from minidist.errors import RunError, UserError, format_count

if TYPE_CHECKING:
    from minidist.config import Config
    from minidist.tools.launch import RankServer
    from minidist.tools.parity.cases import Case

MAX_CASES = 8


def make_case_like(config: "Config", ranks: int) -> "Case":
    """Return the parity case whose layout is that of a run of the simple trainer.

    Its model is small, its ranks start with different values, and their data differ in size. Raises UserError if
    parity has no such case.
    """
    from minidist.tools.parity.cases import HALF, POLICIES, SWITCHES, WITH_OWN_GRADIENTS
    from minidist.tools.parity.layouts import Layout
    from minidist.tools.parity.plan import make_case
    from minidist.validation import validate

    mesh, parallel, mode = config.mesh_of(ranks), config.parallel, config.consistency.mode
    layout = Layout(
        **mesh.sizes,
        schedule=parallel.schedule if mesh.pp > 1 else None,
        sequence=parallel.sequence if mesh.tp > 1 else None,
        context=parallel.context if mesh.cp > 1 else None,
    )
    gradients = f"zero{config.zero.stage}" if config.zero.stage else config.comm.gradients
    if mode != "synchronous":
        gradients = mode
    if config.comm.algorithm != "backend":
        gradients = f"all-reduce={config.comm.algorithm}"
    has_own_gradients = gradients in WITH_OWN_GRADIENTS
    [dtype] = [dtype for dtype, policy in POLICIES.items() if policy == config.precision.policy]
    values = {name: possible[0] for name, possible in SWITCHES.items()} | {
        "dtype": dtype if dtype in HALF else "float64",
        "optimizer": "sgd" if has_own_gradients else "adamw",
        "gradients": gradients,
        "micro_batches": 4 if mesh.pp > 1 or config.train.micro_batches > 1 else 1,
        "tied": config.model.tie_embeddings,
        "padding": True,
        "start": "equal" if ranks == 1 else "different",
        "shares": "equal" if mesh.dp == 1 or has_own_gradients else "uneven",
        "recompute": config.recompute,
        "engine": "simple",
    }
    case = make_case(layout, values)
    validate(case.config(), ranks)
    return case


def choose_cases(exercise: Exercise, ranks: int, max_cases: int = MAX_CASES) -> list["Case"]:
    """Return up to `max_cases` parity cases on `ranks` ranks whose runs call the piece; spread over the plan.

    Raises UserError if no layout calls the piece, or none on so many ranks.
    """
    from minidist.tools.cli import parse_train_options
    from minidist.tools.parity.plan import list_cases, plan_cases

    names, planned = layouts_that_call(exercise.name, read_layouts(exercise.root)), plan_cases(ranks, engine="simple")
    is_for_resumption = exercise.name in read_resumed(exercise.root)
    if not names and not is_for_resumption:
        reason = exercise.route.partition(": ")[2] or "it is on the way of no layout"
        raise UserError(f"no training run calls {exercise.name}, so there is nothing to compare: {reason}")
    calling = [
        make_case_like(parse_train_options([*ENGINE, *layout_options(name, ranks)])[0], ranks)
        for name in names
        if ranks >= MIN_RANKS.get(name, 1)
    ]
    chosen = [
        case
        for case in list_cases(planned)
        if (is_for_resumption and case.resume) or any(_is_like(case, other) for other in calling)
    ]
    if not chosen:
        raise UserError(f"no parity case on {ranks} ranks calls {exercise.name}; give another --ranks")
    step = max(1, len(chosen) // max_cases)
    return chosen[::step][:max_cases]


def _is_like(case: "Case", other: "Case") -> bool:
    """Whether a case runs all that `other` runs; it may recompute, and have 16-bit parameters, if `other` has not."""
    from minidist.tools.parity.cases import HALF

    return (
        (case.mesh_layout, case.gradients) == (other.mesh_layout, other.gradients)
        and other.recompute in (case.recompute, "none")
        and (case.dtype == other.dtype or other.dtype not in HALF)
    )


def run_parity(
    pieces: Sequence[LearnerPiece], cases: Sequence["Case"], server: "RankServer"
) -> Iterator[tuple["Case", dict | str]]:
    """Train the cases with the pieces installed; yield each case with its row of the parity table.

    If the ranks of a case fail, the reason comes instead of the row. The references are trained without the pieces.
    """
    from minidist.tools.parity.run import run

    yield from run(server, cases, prepare=functools.partial(install_pieces, pieces))


def prove_layout(config: "Config", ranks: int, pieces: Sequence[LearnerPiece]) -> str:
    """Compare the layout of a run, with the pieces in it, with one process; return a sentence about the differences.

    Raises RunError if they are beyond the tolerance.
    """
    from minidist.tools.launch import RankServer
    from minidist.tools.parity.cases import STEPS

    try:
        case = make_case_like(config, ranks)
    except UserError as error:
        return f"not compared with one process: {error}"
    with RankServer() as server:
        [(_, row)] = run_parity(pieces, [case], server)
    if isinstance(row, str):
        raise RunError(f"{case.name} with your code failed:\n{row}")
    if not row["ok"]:
        raise RunError(f"{case.name} with your code differs from one process. {row['first_wrong']}")
    what = "parameters" if case.has_own_gradients else "gradients"
    difference = row["param_diff" if case.has_own_gradients else "grad_diff"]
    return f"equal to one process: {case.name}, {STEPS} steps of a small model; the {what} differ by {difference:.1e}"


def print_parity(exercise: Exercise, piece: LearnerPiece, ranks: int, server: "RankServer") -> bool:
    """Run the parity cases that call the piece and print a row for each; return whether all equal one process."""
    from minidist.tools.parity.command import format_result_row

    cases, equal = choose_cases(exercise, ranks), True
    print(f"{exercise.name}: {format_count(len(cases), 'layout')} that call it", flush=True)
    for case, row in run_parity([piece], cases, server):
        equal = equal and isinstance(row, dict) and row["ok"]
        lines = format_result_row(row) if isinstance(row, dict) else [case.name, *row.splitlines()]
        print("\n".join(f"  {line}" for line in lines), flush=True)
    return equal
