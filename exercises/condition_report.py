"""Which conditions refuse which wrong answers: `python -m exercises gate --conditions`.

Every wrong answer to an exercise with a `Declaration`, from its catalogue and made by a machine (where the mistake has
an effect under some condition), is checked under one kind of condition at a time, without the exercise's own tests.
Those that the usual arguments refuse are not tried further. A kind that is never the only one to refuse an answer could
be left out; an answer that no kind refuses needs a test of its own.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.answers import read_answers
from exercises.catalogue import Exercise
from exercises.check import CONDITIONS_TEST, check
from exercises.conditions import KINDS, USUAL
from exercises.generated_mistakes import make_mistakes
from minidist.errors import UserError

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer


def has_conditions(exercise: Exercise) -> bool:
    """Return whether one of the exercise's tests runs the answer under all conditions."""
    return CONDITIONS_TEST in [test.id for test in exercise.tests()]


def run_conditions(exercises: Iterable[Exercise], server: "RankServer", folder: Path) -> bool:
    """Print how many wrong answers the conditions refuse, in all and of each kind; False if no exercise has conditions.

    folder: for the answers.
    """
    refused, only, answers, by_conditions = Counter[str](), Counter[str](), 0, 0
    for exercise in filter(has_conditions, exercises):
        found = {
            name: _refusing_kinds(exercise, text, server, folder)
            for name, text in _wrong_answers(exercise, server, folder)
        }
        answers, by_conditions = answers + len(found), by_conditions + sum(map(bool, found.values()))
        for kinds in found.values():
            refused.update(kinds)
            only.update(kinds if len(kinds) == 1 else ())
        refused_here = sum(map(bool, found.values()))
        print(f"{exercise.name:<26}{refused_here:3} of {len(found):3} wrong answers refused", flush=True)
        for name in (name for name, kinds in found.items() if not kinds):
            print(f"    not refused: {name}", flush=True)
    if not answers:
        raise UserError(f"none of these exercises has a test {CONDITIONS_TEST}")
    print(f"{'all':<26}{by_conditions:3} of {answers:3} wrong answers refused ({by_conditions / answers:.0%})\n")
    print(f"{'kind of condition':<26}refuses   alone")
    for kind in KINDS:
        print(f"{kind:<26}{refused[kind]:7}{only[kind]:8}")
    return True


def _wrong_answers(exercise: Exercise, server: "RankServer", folder: Path) -> Iterable[tuple[str, str]]:
    """Yield (name, program) of the exercise's wrong answers and of the mistakes that are made in its solution."""
    for answer in read_answers(exercise).wrong:
        yield answer.name, stubs.generate_answer(exercise, answer.name)
    raising = make_mistakes(exercise, raises=True)
    for name, (_, program) in make_mistakes(exercise).items():
        if not _passes(exercise, raising[name][1], server, folder):
            yield f"mistake_{name}", program


def _passes(exercise: Exercise, text: str, server: "RankServer", folder: Path, kind: str | None = None) -> bool:
    """Return whether a program passes under all conditions, or under those of one kind."""
    file = folder / f"{exercise.name}.py"
    file.write_text(text)
    return check(exercise, file, server, only=[CONDITIONS_TEST], condition=kind).passed


def _refusing_kinds(exercise: Exercise, text: str, server: "RankServer", folder: Path) -> list[str]:
    """Return the kinds of conditions that refuse a program; the usual arguments alone if they do."""
    if not _passes(exercise, text, server, folder, USUAL):
        return [USUAL]
    return [kind for kind in KINDS if kind != USUAL and not _passes(exercise, text, server, folder, kind)]
