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
from exercises.mutants import Mutant, blank_lines, make_mutants

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer

MIN_KILLED = 0.95
_HANG_S = 2.0  # a busy machine may pause for this long; survivors get longer
_OUTCOMES = ("killed", "equivalent", "survived")


@dataclass
class MutantCounts:
    """The counts of killed, surviving and equivalent mutants of one exercise or kind, and the time taken."""

    outcomes: Counter = field(default_factory=Counter)
    time_s: float = 0.0

    @property
    def rate(self) -> float:
        """The fraction of non-equivalent mutants that was killed; 1 if there are none."""
        total = self.outcomes["killed"] + self.outcomes["survived"]
        return self.outcomes["killed"] / total if total else 1.0

    def __str__(self) -> str:
        text = "  ".join(f"{self.outcomes[outcome]:>4} {outcome}" for outcome in _OUTCOMES)
        return f"{self.outcomes.total():>4} mutants  {text}  {self.rate:7.1%}"


@dataclass
class MutationRun:
    """Mutation tests of several exercises; `green` if the rate of killed mutants suffices and there is no problem."""

    server: "RankServer"
    exercises: dict[str, MutantCounts] = field(default_factory=dict)
    kinds: dict[str, MutantCounts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether there is no problem and every exercise kills enough of its mutants."""
        rates = [counts.rate for counts in self.exercises.values()]
        return bool(rates) and not self.problems and min(rates) >= MIN_KILLED

    def run(self, exercise: Exercise) -> MutantCounts:
        """Try every mutant of one exercise."""
        start_s, counts = time.perf_counter(), MutantCounts()
        known = read_answers(exercise).equivalents
        left = dict(known)
        for mutant in solution_mutants(exercise):
            entry = (mutant.was, mutant.becomes)
            caught = self._first_failed_test(exercise, mutant, HANG_S if entry in known else _HANG_S)
            left.pop(entry, None)
            outcome = "killed" if caught else "equivalent" if entry in known else "survived"
            for each in (counts, self.kinds.setdefault(mutant.kind, MutantCounts())):
                each.outcomes[outcome] += 1
            if caught and entry in known:
                self._add_problem(exercise, f"is not equivalent, {caught} fails: {_format_change(mutant)}")
            elif outcome == "survived":
                self._add_problem(
                    exercise, f"line {mutant.line} of the solution, {mutant.kind}: {_format_change(mutant)}"
                )
        for was, becomes in left:
            self._add_problem(
                exercise,
                f"{exercise.answers.name} lists no mutant as equivalent: {was}  ->  {becomes}",
            )
        if not counts.outcomes:
            self._add_problem(exercise, "there is no mutant")
        counts.time_s = time.perf_counter() - start_s
        self.exercises[exercise.name] = counts
        return counts

    def report(self) -> list[str]:
        """Format the totals, the results by kind of change, and the problems."""
        total = MutantCounts(sum((counts.outcomes for counts in self.exercises.values()), Counter()))
        kinds = [f"{kind:<28}{counts}" for kind, counts in sorted(self.kinds.items())]
        return ["", *kinds, "", f"{'all':<28}{total}", *self.problems]

    def _first_failed_test(self, exercise: Exercise, mutant: Mutant, hang_s: float) -> str:
        """Return the name of the test that the mutant fails; "" if it passes all."""
        with tempfile.TemporaryDirectory(prefix="minidist-mutant-") as folder:
            file = Path(folder, f"{exercise.name}.py")
            file.write_text(mutant.text)
            verdict = check(exercise, file, self.server, hang_s=hang_s, stop=True)
        failed = [result for result in verdict.results if result.finding and result.finding.kind != "skipped"]
        return failed[0].id if failed else ""

    def _add_problem(self, exercise: Exercise, text: str) -> None:
        """Record a problem of an exercise."""
        self.problems.append(f"{exercise.name}: {text}")


def solution_mutants(exercise: Exercise) -> list[Mutant]:
    """Return the mutants of an exercise's solution, within the lines that the learner writes."""
    solution = stubs.generate_solution(exercise)
    return make_mutants(solution, blank_lines(stubs.generate_stub(exercise), solution))


def run_mutants(exercises: Sequence[Exercise], server: "RankServer") -> bool:
    """Run the mutants of these exercises and print the report; return whether the run is green."""
    mutation_run = MutationRun(server)
    for exercise in _with_blanks(exercises):
        counts = mutation_run.run(exercise)
        print(f"{exercise.name:<28}{counts}{counts.time_s:8.1f} s", flush=True)
    if not mutation_run.exercises:
        mutation_run.problems.append("nothing was mutated: no exercise leaves lines of a piece blank")
    print("\n".join(mutation_run.report()))
    return mutation_run.green


def _with_blanks(exercises: Iterable[Exercise]) -> list[Exercise]:
    """Return the exercises with blank lines; the other kinds have none to mutate."""
    return [exercise for exercise in exercises if exercise.kind == "piece"]


def _format_change(mutant: Mutant) -> str:
    """Return the changed lines before and after as one line."""
    return f"{mutant.was}  ->  {mutant.becomes}"
