"""Whether an exercise's tests see small mistakes: each mutant of its solution must fail one of them.

A mutant that passes is a mistake that the tests let through, or it means the same as the solution. What is known to
mean the same stands, with the reason, in the exercise's file of answers, as a list of tables `[[equivalent]]` with the
keys `was`, `becomes` and `why`. An entry whose mutant is gone, or fails after all, is wrong.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.answers import read_answers
from exercises.catalogue import Exercise
from exercises.check import HANG_S, check
from exercises.mutants import Mutant, blanks, mutants

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer

LEAST_KILLED = 0.95
_HANG_S = 2.0  # a busy machine may stop for so long; of what is to survive, more is asked
_FATES = ("killed", "equivalent", "survived")


@dataclass
class Tally:
    """What became of the mutants of one exercise or of one kind, and how long it took."""

    fates: Counter = field(default_factory=Counter)
    time_s: float = 0.0

    @property
    def rate(self) -> float:
        """Part of the mutants that are not equivalent which was killed; 1 when there is none."""
        judged = self.fates["killed"] + self.fates["survived"]
        return self.fates["killed"] / judged if judged else 1.0

    def __str__(self) -> str:
        told = "  ".join(f"{self.fates[fate]:>4} {fate}" for fate in _FATES)
        return f"{self.fates.total():>4} mutants  {told}  {self.rate:7.1%}"


@dataclass
class Mutation:
    """The mutants of all exercises asked for. It is green when none survived that is not known to be equivalent."""

    server: "RankServer"
    exercises: dict[str, Tally] = field(default_factory=dict)
    kinds: dict[str, Tally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        tallies = self.exercises.values()
        return bool(tallies) and not self.problems and all(tally.rate >= LEAST_KILLED for tally in tallies)

    def run(self, exercise: Exercise) -> Tally:
        """Try every mutant of one exercise."""
        start_s, tally = time.perf_counter(), Tally()
        known = read_answers(exercise).equivalents
        left = dict(known)
        for mutant in mutants_of(exercise):
            entry = (mutant.was, mutant.becomes)
            caught = self._caught(exercise, mutant, HANG_S if entry in known else _HANG_S)
            left.pop(entry, None)
            fate = "killed" if caught else "equivalent" if entry in known else "survived"
            for each in (tally, self.kinds.setdefault(mutant.kind, Tally())):
                each.fates[fate] += 1
            if caught and entry in known:
                self._problem(exercise, f"is no equivalent, {caught} sees it: {_told(mutant)}")
            elif fate == "survived":
                self._problem(exercise, f"line {mutant.line} of the solution, {mutant.kind}: {_told(mutant)}")
        for was, becomes in left:
            self._problem(exercise, f"{exercise.answers.name} names what is no mutant: {was}  ->  {becomes}")
        if not tally.fates:
            self._problem(exercise, "there is no mutant")
        tally.time_s = time.perf_counter() - start_s
        self.exercises[exercise.name] = tally
        return tally

    def report(self) -> list[str]:
        """The sums, what each kind of change came to, and the problems."""
        total = Tally(sum((tally.fates for tally in self.exercises.values()), Counter()))
        kinds = [f"{kind:<28}{tally}" for kind, tally in sorted(self.kinds.items())]
        return ["", *kinds, "", f"{'all':<28}{total}", *self.problems]

    def _caught(self, exercise: Exercise, mutant: Mutant, hang_s: float) -> str:
        """The test that the mutant fails; nothing when it passes all."""
        with tempfile.TemporaryDirectory(prefix="minidist-mutant-") as folder:
            file = Path(folder, f"{exercise.name}.py")
            file.write_text(mutant.text)
            verdict = check(exercise, file, self.server, hang_s=hang_s, stop=True)
        failed = [result for result in verdict.results if result.finding and result.finding.kind != "skipped"]
        return failed[0].id if failed else ""

    def _problem(self, exercise: Exercise, text: str) -> None:
        self.problems.append(f"{exercise.name}: {text}")


def mutants_of(exercise: Exercise) -> list[Mutant]:
    """The mutants of an exercise's solution, inside the lines that its learner writes."""
    solution = stubs.solution(exercise)
    return mutants(solution, blanks(stubs.stub(exercise), solution))


def run(exercises: Sequence[Exercise], server: "RankServer") -> bool:
    """Try the mutants of all these exercises and print what became of them; whether all is green."""
    mutation = Mutation(server)
    for exercise in _with_blanks(exercises):
        tally = mutation.run(exercise)
        print(f"{exercise.name:<28}{tally}{tally.time_s:8.1f} s", flush=True)
    if not mutation.exercises:
        mutation.problems.append("nothing was mutated: no exercise leaves lines of a piece blank")
    print("\n".join(mutation.report()))
    return mutation.green


def _with_blanks(exercises: Iterable[Exercise]) -> list[Exercise]:
    """Those that leave lines of a piece to the learner: what the others ask for is no program with lines missing."""
    return [exercise for exercise in exercises if exercise.kind == "piece"]


def _told(mutant: Mutant) -> str:
    return f"{mutant.was}  ->  {mutant.becomes}"
