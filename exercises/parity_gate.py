"""Answers in the trainer: a part of `python -m exercises gate`, or all of it with `--parity`.

The tests of an exercise call its function by themselves. Here answers are installed in the simple trainer, and a run of
a small model is compared with one process. A layout that notices no mistake would prove nothing, so wrong answers are
tried first, in each layout that calls the function, until one differs from one process. In that layout the solution and
every other right answer must equal one process.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.answers import Answers, read_answers
from exercises.catalogue import Exercise
from exercises.layouts import ENGINE, MIN_RANKS, layout_options, layouts_that_call, read_layouts
from exercises.learner_pieces import LearnerPiece
from exercises.parity import choose_cases, make_case_like, run_parity
from minidist.errors import UserError, format_count

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer
    from minidist.tools.parity.cases import Case

_RANKS = 2  # or more, for a layout that needs more
_MAX_WRONG = 16  # wrong answers that are tried in each layout; one that shows may come late
_MAX_WRONG_WITHOUT_EFFECT = 4  # for exercises of which none should show
_MAX_CASES = 6  # layouts in which they are tried
# Exercises that no run of parity can see, with the reason. Their right answers must still equal one process.
WITHOUT_EFFECT = {
    "loss_scaler": "any power of two cancels exactly, and no gradient of these runs overflows",
    "replica_digest": "these runs compare no replicas",
    "replica_recovery": "these runs damage no replica",
    "training_run": "these runs drive the engine of a trainer, and not the trainer",
}
_WRONG_EVERYWHERE = "wrong_zero"
_NOT_NATURAL = (_WRONG_EVERYWHERE, "wrong_constant", "wrong_cheat")  # the names begin so


@dataclass(frozen=True)
class ParityResult:
    """What the trainer says of an exercise's answers.

    case: the parity case in which they ran; "" if there is none. right: the number of right answers. refused: the
    wrong answer that differs from one process. problems: right answers that differ, or that no wrong answer does,
    each after the exercise's name. reason: why there is no case.
    """

    case: str = ""
    right: int = 0
    refused: str = ""
    problems: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"not run: {self.reason}"
        return f"{self.case}: {format_count(self.right, 'right answer')}, refuses {self.refused or 'no wrong answer'}"


def judge_in_trainer(exercise: Exercise, server: "RankServer") -> ParityResult:
    """Find a layout that notices one of the exercise's wrong answers; run each right answer in it."""
    if exercise.kind != "piece":
        return ParityResult(reason="no part of the trainer")
    try:
        cases = _find_cases(exercise)
    except UserError as error:
        return ParityResult(reason=str(error))
    answers = read_answers(exercise)
    wrong = _choose_wrong(answers, _MAX_WRONG_WITHOUT_EFFECT if exercise.name in WITHOUT_EFFECT else _MAX_WRONG)
    tried = ((case, name) for case in cases for name in wrong)
    noticed = (
        each for each in tried if _find_difference(exercise, stubs.generate_answer(exercise, each[1]), each[0], server)
    )
    case, refused = next(noticed, (cases[0], ""))
    problems = []
    if refused and exercise.name in WITHOUT_EFFECT:
        problems.append(f"{refused} differs from one process, so parity_gate.WITHOUT_EFFECT must not list it")
    if not refused and exercise.name not in WITHOUT_EFFECT:
        names = " and ".join(each.name for each in cases)
        problems.append(f"{', '.join(wrong)} equal one process in {names}: no layout depends on this exercise")
    right = {"solution": exercise.solution.read_text()}
    right |= {answer.name: stubs.generate_answer(exercise, answer.name) for answer in answers.right}
    for name, text in right.items():
        if difference := _find_difference(exercise, text, case, server):
            problems.append(f"{name} is right and differs from one process in {case.name}: {difference}")
    return ParityResult(case.name, len(right), refused, tuple(f"{exercise.name}: {problem}" for problem in problems))


def run_parity_gate(exercises: Iterable[Exercise], server: "RankServer") -> bool:
    """Print a line for each exercise; return whether there is no problem.

    Raises UserError if no training run calls any of these exercises.
    """
    problems, ran = [], 0
    for exercise in exercises:
        result = judge_in_trainer(exercise, server)
        problems += result.problems
        ran += not result.reason
        state = "" if result.reason else f"{'red' if result.problems else 'green':<6}"
        print(f"{exercise.name:<28}{state}{result}", flush=True)
    if not ran:
        raise UserError("no training run calls these exercises")
    print("\n".join(problems) or f"{format_count(ran, 'exercise')}, all green")
    return not problems


def _choose_wrong(answers: Answers, most: int) -> list[str]:
    """Return the names of at most `most` wrong answers to try in each layout: natural ones, then one that does nothing.

    Those with a finding of their own are broken, and wrong anywhere. Cheating ones have the right values.
    """
    natural = [
        each.name
        for each in answers.wrong
        if not (each.finding or each.is_generated or each.name.startswith(_NOT_NATURAL))
    ]
    return [*natural[: most - 1], *(each.name for each in answers.wrong if each.name == _WRONG_EVERYWHERE)]


def _find_cases(exercise: Exercise) -> list["Case"]:
    """Return a parity case for each layout that calls the exercise's function.

    Raises UserError if there is none.
    """
    from minidist.tools.cli import parse_train_options

    cases = {}
    for name in layouts_that_call(exercise.name, read_layouts(exercise.root)):
        ranks = max(_RANKS, MIN_RANKS.get(name, 1))
        with contextlib.suppress(UserError):  # parity has no such layout
            case = make_case_like(parse_train_options([*ENGINE, *layout_options(name, ranks)])[0], ranks)
            cases[case.name] = case
    found = list(cases.values())[:_MAX_CASES]
    if found:  # what saves and loads has an effect only in a run that is stopped and resumed
        found.insert(1, replace(found[0], resume=True))
    return found or choose_cases(exercise, _RANKS, max_cases=1)


def _find_difference(exercise: Exercise, text: str, case: "Case", server: "RankServer") -> str:
    """Return how a run with this program differs from one process, or how it failed; "" if it is equal."""
    piece = LearnerPiece(exercise.name, exercise.pieces, f"{exercise.name}.py", text)
    [(_, row)] = run_parity([piece], [case], server)
    if isinstance(row, str):
        return row.strip().splitlines()[0] if row.strip() else "the run failed"
    return "" if row["ok"] else row["first_wrong"]
