"""A trial of the graders with answers whose authors have not seen them: `python -m exercises gate --trial FOLDER`.

The catalogue of right and wrong answers was written together with the tests, so all of it dies. How much of what
somebody else writes would pass? `FOLDER/<exercise>.toml` has such answers in the format of `exercises.answers`, without
`caught_by`. The trial counts the wrong ones that fail and the right ones that pass, and lists all others.
"""

import ast
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from exercises import report, stubs
from exercises.answers import Answer, read_answers
from exercises.catalogue import Catalogue, Exercise
from exercises.check import CONDITIONS_TEST, check, modules_to_preload
from minidist.errors import UserError
from minidist.tools.launch import RankServer
from minidist.tools.launch.threads import usable_cores


@dataclass(frozen=True)
class Outcome:
    """What the tests say of one answer. failed: the tests that it fails; message: of the first one."""

    exercise: str
    answer: Answer
    failed: tuple[str, ...]
    message: str

    @property
    def is_graded_correctly(self) -> bool:
        """Whether a right answer passes, or a wrong one fails a test."""
        return self.answer.is_right != bool(self.failed)

    @property
    def only_conditions(self) -> bool:
        """Whether the conditions of all exercises refuse this answer and no test of its own exercise does."""
        return self.failed == (CONDITIONS_TEST,)


def read_trial(folder: Path, exercises: Iterable[Exercise], into: Path) -> list[tuple[Exercise, Answer, Path]]:
    """Read the answers in `folder`; return each with its program, a file in the folder `into`.

    Raises UserError if there is none, if edits do not apply, or if a program is not Python.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with files EXERCISE.toml")
    if unknown := sorted({file.stem for file in folder.glob("*.toml")} - set(Catalogue())):
        raise UserError(f"{folder} has answers to exercises that do not exist: {', '.join(unknown)}")
    found = []
    for exercise in exercises:
        file = folder / f"{exercise.name}.toml"
        answers = read_answers(exercise, file)
        for answer in answers.by_name.values():
            program = stubs.write_answer(exercise, answer.name, into, answers)
            try:
                ast.parse(program.read_text())
            except SyntaxError as error:
                raise UserError(f"{file}: {answer.name} is not Python: {error}") from None
            found.append((exercise, answer, program))
    if not found:
        raise UserError(f"{folder} has no answer to these exercises; it needs files EXERCISE.toml")
    return found


def run_trial(folder: Path, exercises: Iterable[Exercise], into: Path) -> bool:
    """Check all answers in `folder`, one per core at a time; print the counts, and each answer that is graded wrongly.

    into: for the programs. Returns whether every wrong answer failed and every right one passed.
    """
    exercises = list(exercises)
    trial, servers = read_trial(folder, exercises, into), SimpleQueue()

    def grade(one: tuple[Exercise, Answer, Path]) -> Outcome:
        exercise, answer, program = one
        server = servers.get()
        try:
            found = [each for each in check(exercise, program, server).results if each.finding]
        finally:
            servers.put(server)
        failed = tuple(each.id for each in found if each.finding.kind != "skipped")
        message = " / ".join(report.format_finding(found[0].finding)) if found else ""
        return Outcome(exercise.name, answer, failed or tuple(each.id for each in found), message)

    outcomes = []
    with ExitStack() as stack, ThreadPoolExecutor(usable_cores()) as pool:
        for _ in range(usable_cores()):
            servers.put(stack.enter_context(RankServer(preload=modules_to_preload(exercises))))
        for outcome in pool.map(grade, trial):
            outcomes.append(outcome)
            if not outcome.is_graded_correctly:
                what = outcome.message or f"passes: {outcome.answer.note}"
                print(f"{outcome.exercise}: {outcome.answer.name} {what}", flush=True)
    for exercise in sorted({each.exercise for each in outcomes}):
        print(f"{exercise:<28}{_format_counts([each for each in outcomes if each.exercise == exercise])}")
    print(f"{'all':<28}{_format_counts(outcomes)}")
    alone = sum(each.only_conditions for each in outcomes if not each.answer.is_right)
    print(f"refused by nothing but the conditions shared by all exercises: {alone}")
    return all(each.is_graded_correctly for each in outcomes)


def _format_counts(outcomes: list[Outcome]) -> str:
    """Return how many wrong answers fail and right ones pass, as text."""
    texts = []
    for is_right, what in ((False, "wrong answers fail"), (True, "right answers pass")):
        these = [each for each in outcomes if each.answer.is_right == is_right]
        texts.append(f"{sum(each.is_graded_correctly for each in these):4} of {len(these):3} {what}")
    return ",".join(texts)
