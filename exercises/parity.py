"""Parity with the learner's code: the trainer's layouts that call a piece, each compared with one process.

The tests of an exercise call the piece by itself. Here it is installed in place of the package's code, and the trainer
runs with it: several steps, uneven batches, tied embeddings, 16-bit parameters, ZeRO, pipelines, resumption.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exercises.catalogue import Exercise
from exercises.train import LearnerPiece, PieceChoice, conflicting_option, has_route, install_pieces
from minidist.errors import UserError, format_count

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer
    from minidist.tools.parity.cases import Case

MAX_CASES = 8


def choose_cases(exercise: Exercise, ranks: int, max_cases: int = MAX_CASES) -> list["Case"]:
    """Return up to `max_cases` parity cases on `ranks` ranks whose runs call the piece; spread over the plan.

    Raises UserError if no training run calls the piece, or none on so many ranks.
    """
    from minidist.tools.parity.plan import list_cases, plan_cases

    if not has_route(exercise):
        reason = exercise.route.partition(": ")[2] or "it is not connected"
        raise UserError(f"no training run calls {exercise.name}, so there is nothing to compare: {reason}")
    planned = [case for case in list_cases(plan_cases(ranks)) if case.world_size == ranks]
    calling = [case for case in planned if not conflicting_option(PieceChoice(exercise), case.config(), ranks)]
    if not calling:
        raise UserError(f"none of the {len(planned)} parity cases on {ranks} ranks calls {exercise.name}")
    step = max(1, len(calling) // max_cases)
    return calling[::step][:max_cases]


def run_parity(
    piece: LearnerPiece, cases: Sequence["Case"], server: "RankServer"
) -> Iterator[tuple["Case", dict | str]]:
    """Train the cases with the piece installed; yield each case with its row of the parity table.

    If the ranks of a case fail, the reason comes instead of the row. The references are trained without the piece.
    """
    from minidist.tools.parity.run import run

    yield from run(server, cases, prepare=functools.partial(install_pieces, [piece]))


def print_parity(exercise: Exercise, piece: LearnerPiece, ranks: int, server: "RankServer") -> bool:
    """Run the parity cases that call the piece and print a row for each; return whether all equal one process."""
    from minidist.tools.parity.command import format_result_row

    cases, equal = choose_cases(exercise, ranks), True
    print(f"{exercise.name}: {format_count(len(cases), 'layout')} that call it", flush=True)
    for case, row in run_parity(piece, cases, server):
        equal = equal and isinstance(row, dict) and row["ok"]
        lines = format_result_row(row) if isinstance(row, dict) else [case.name, *row.splitlines()]
        print("\n".join(f"  {line}" for line in lines), flush=True)
    return equal
