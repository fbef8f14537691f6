"""Mutation testing of the exercises' tests: each mutant of a solution must fail one of them.

A mutant that survives is a mistake that the tests miss, or is equivalent to the solution. Known equivalents are listed
in the exercise's answers file as tables `[[equivalent]]` with the keys `was`, `becomes` and `why`. An entry whose
mutant no longer exists, or is killed, is an error.
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
_HANG_S = 2.0  # a busy machine may pause for this long; survivors get longer
_FATES = ("killed", "equivalent", "survived")


@dataclass
class Tally:
    """The counts of killed, surviving and equivalent mutants of one exercise or kind, and the time taken."""

    fates: Counter = field(default_factory=Counter)
    time_s: float = 0.0

    @property
    def rate(self) -> float:
        """The fraction of non-equivalent mutants that was killed; 1 if there are none."""
        judged = self.fates["killed"] + self.fates["survived"]
        return self.fates["killed"] / judged if judged else 1.0

    def __str__(self) -> str:
        told = "  ".join(f"{self.fates[fate]:>4} {fate}" for fate in _FATES)
        return f"{self.fates.total():>4} mutants  {told}  {self.rate:7.1%}"


@dataclass
class Mutation:
    """A mutation run over several exercises. Green if every survivor is a known equivalent."""

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
        """Format the totals, the results by kind of change, and the problems."""
        total = Tally(sum((tally.fates for tally in self.exercises.values()), Counter()))
        kinds = [f"{kind:<28}{tally}" for kind, tally in sorted(self.kinds.items())]
        return ["", *kinds, "", f"{'all':<28}{total}", *self.problems]

    def _caught(self, exercise: Exercise, mutant: Mutant, hang_s: float) -> str:
        """Return the name of the test that the mutant fails; "" if it passes all."""
        with tempfile.TemporaryDirectory(prefix="minidist-mutant-") as folder:
            file = Path(folder, f"{exercise.name}.py")
            file.write_text(mutant.text)
            verdict = check(exercise, file, self.server, hang_s=hang_s, stop=True)
        failed = [result for result in verdict.results if result.finding and result.finding.kind != "skipped"]
        return failed[0].id if failed else ""

    def _problem(self, exercise: Exercise, text: str) -> None:
        self.problems.append(f"{exercise.name}: {text}")


def mutants_of(exercise: Exercise) -> list[Mutant]:
    """Return the mutants of an exercise's solution, within the lines that the learner writes."""
    solution = stubs.solution(exercise)
    return mutants(solution, blanks(stubs.stub(exercise), solution))


def run(exercises: Sequence[Exercise], server: "RankServer") -> bool:
    """Run the mutants of these exercises and print the report; return whether the run is green."""
    mutation = Mutation(server)
    for exercise in _with_blanks(exercises):
        tally = mutation.run(exercise)
        print(f"{exercise.name:<28}{tally}{tally.time_s:8.1f} s", flush=True)
    if not mutation.exercises:
        mutation.problems.append("nothing was mutated: no exercise leaves lines of a piece blank")
    print("\n".join(mutation.report()))
    return mutation.green


def _with_blanks(exercises: Iterable[Exercise]) -> list[Exercise]:
    """Return the exercises with blank lines; the other kinds have none to mutate."""
    return [exercise for exercise in exercises if exercise.kind == "piece"]


def _told(mutant: Mutant) -> str:
    return f"{mutant.was}  ->  {mutant.becomes}"
