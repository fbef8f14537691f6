"""One attempt at an exercise: grade the learner's file, record the result, write the report.

The command line, the notebook magics and `watch` all grade through this module.
"""

from typing import TYPE_CHECKING, NamedTuple

from exercises import report
from exercises.catalogue import Exercise
from exercises.check import Verdict, check
from exercises.work import Work
from minidist.errors import UserError

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer


class Attempt(NamedTuple):
    """The verdict on a learner's file, and the report about it."""

    verdict: Verdict
    text: str


def grade_attempt(exercise: Exercise, work: Work, server: "RankServer") -> Attempt:
    """Grade the learner's file of the exercise and record the result. Raises UserError when the file is missing."""
    answer = work.file(exercise)
    if not answer.is_file():
        raise UserError(f"{answer} is not there; python -m exercises start copies the stubs to {work.folder}")
    verdict = check(exercise, answer, server)
    work.record(exercise, verdict.passed, verdict.points, verdict.content)
    return Attempt(verdict, report.format_verdict(verdict, hints_left(exercise, work)))


def hints_left(exercise: Exercise, work: Work) -> int:
    """Return the number of hints that the learner has not seen."""
    return len(exercise.hints) - work.entry(exercise).get("hints", 0)


def reveal_hint(exercise: Exercise, work: Work) -> str:
    """Reveal the next hint; return it with all earlier ones."""
    shown = exercise.hints[: work.reveal_next_hint(exercise)]
    return "\n".join(f"hint {number} of {len(exercise.hints)}: {text}" for number, text in enumerate(shown, start=1))
