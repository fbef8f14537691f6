"""The command line: `python -m exercises start`, `check block_partition`, ...

The commands gate, new and generate are for those who write exercises.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from exercises import mutate, new, report, stubs
from exercises.attempt import grade_attempt, hints_left, reveal_hint
from exercises.catalogue import ROOT, Catalogue
from exercises.check import PRELOAD, check, modules_to_preload
from exercises.gate import Gate
from exercises.jupyterlab import start_jupyterlab
from exercises.train import train
from exercises.watch import Watcher
from exercises.work import Work
from minidist.errors import UserError, suggest
from minidist.tools.cli import format_usage, run_to_exit_code
from minidist.tools.launch import RankServer
from minidist.tools.launch.torchrun import defer_sigterm, end_rank
from minidist.tools.options import HIDDEN, POSITIONAL, parse_options

_PROGRAM = "python -m exercises"


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of every command."""

    work: Path = ROOT / "work"
    """Your folder, with copies of notebooks and exercises."""
    root: Annotated[Path, HIDDEN] = ROOT
    """The repository."""


@dataclass(frozen=True)
class StartOptions(_Options):
    """Copy the notebooks and the exercises to work/, where you edit them."""


@dataclass(frozen=True)
class LabOptions(_Options):
    """Update work/, then start JupyterLab there. Other options go to jupyter lab."""


@dataclass(frozen=True)
class UpdateOptions(_Options):
    """Copy new and changed files of the course to work/, and keep every file that you have edited."""


@dataclass(frozen=True)
class ListOptions(_Options):
    """List all exercises: section, name, points, minutes, difficulty from 1 to 5, title."""


@dataclass(frozen=True)
class CheckOptions(_Options):
    """Check your answer to an exercise."""

    name: Annotated[str, POSITIONAL]
    """The exercise; `list` shows their names."""
    json: bool = False
    """Print the verdict as JSON, with the points of each test."""
    file: Path | None = None
    """Check this file instead of the one in work/, and do not record the result."""


@dataclass(frozen=True)
class WatchOptions(_Options):
    """Check the file of an exercise whenever you save it. Ctrl-C ends it."""

    name: Annotated[str | None, POSITIONAL] = None
    """The exercise to begin with. By default the first that you have not passed."""


@dataclass(frozen=True)
class HintOptions(_Options):
    """Show the next hint for an exercise, and the earlier ones."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""


@dataclass(frozen=True)
class ResetOptions(_Options):
    """Replace your file of an exercise by a new copy of the stub, and keep your file as a backup."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""


@dataclass(frozen=True)
class SolutionOptions(_Options):
    """Show the package's own code for an exercise, and why it is written that way."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""
    anyway: bool = False
    """Show the solution even if you have not passed the exercise."""


@dataclass(frozen=True)
class ProgressOptions(_Options):
    """Show your points, attempts and hints."""


@dataclass(frozen=True)
class TrainOptions(_Options):
    """Train the model with your passed code in place of the package's. Other options are those of minidist train."""

    only: tuple[str, ...] = ()
    """Use your code of these exercises only, and the package's code for the others."""


@dataclass(frozen=True)
class GateOptions(_Options):
    """For authors: test the graders of exercises with right and wrong answers."""

    names: Annotated[tuple[str, ...], POSITIONAL] = ()
    """The exercises. By default all."""
    mutate: bool = False
    """Test with small mutations of the solutions instead, which the tests must notice."""


@dataclass(frozen=True)
class NewOptions(_Options):
    """For authors: create all files of a new exercise about a function or class of the package."""

    name: Annotated[str, POSITIONAL]
    """Name of the exercise and of its files."""
    chapter: str
    """The chapter's folder in exercises/, such as ch03_communication."""
    piece: str
    """The function or class that the learner writes, as MODULE:SYMBOL."""


@dataclass(frozen=True)
class GenerateOptions(_Options):
    """For authors: generate stubs and solutions from the package's source."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done or passed, 1 not passed or failed, 2 invalid request."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(words), "exercises")


def _run(words: list[str]) -> int:
    leading = []  # options before the command
    while words and words[0].partition("=")[0] in ("--work", "--root"):
        count = 1 if "=" in words[0] else 2
        leading, words = [*leading, *words[:count]], words[count:]
    if not words or words[0] in ("-h", "--help"):
        print(format_usage(_PROGRAM, {name: _summary(kind) for name, (kind, _) in COMMANDS.items()}))
        return 0 if words else 2
    if words[0] not in COMMANDS:
        guess = suggest(words[0], COMMANDS)
        raise UserError(f"there is no command {words[0]!r}; {guess} {_PROGRAM} --help lists them.")
    kind, command = COMMANDS[words[0]]
    passes_on = command in (_lab, _train)
    read = parse_options(kind, f"{_PROGRAM} {words[0]}", [*leading, *words[1:]], keep_unknown=passes_on)
    options, rest = read if passes_on else (read, [])
    catalogue, work = Catalogue(options.root), Work(options.work)
    return command(options, catalogue, work, rest) if passes_on else command(options, catalogue, work)


def _summary(kind: type) -> str:
    return kind.__doc__.partition(". ")[0].rstrip(".")


def _start(options: _Options, catalogue: Catalogue, work: Work) -> int:
    done = work.update(catalogue)
    for action, files in done.items():
        for file in files:
            newer = "  (you have edited it; the course has a newer version)" if action == "kept" else ""
            print(f"{action:<8}{file}{newer}")
    if not any(done.values()):
        print(f"{work.folder} is up to date")
    return 0


def _lab(options: LabOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    _start(options, catalogue, work)
    sys.stdout.flush()  # the output of _start, before JupyterLab replaces this process
    start_jupyterlab(work, rest)
    return 0


def _list(options: ListOptions, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        mark = "passed" if work.entry(exercise).get("passed") else ""
        facts = f"{exercise.points:>3} points {exercise.minutes:>4} min  difficulty {exercise.difficulty}"
        print(f"{exercise.section:<5}{exercise.name:<26}{facts}  {mark:<7} {exercise.title}".rstrip())
    return 0


def _check(options: CheckOptions, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    with RankServer(preload=modules_to_preload(exercise)) as server:
        if options.file:
            verdict = check(exercise, options.file, server)
            text = report.format_verdict(verdict, hints_left(exercise, work))
        else:
            verdict, text = grade_attempt(exercise, work, server)
    print(json.dumps(report.as_json(verdict), indent=2) if options.json else text)
    return 0 if verdict.passed else 1


def _watch(options: WatchOptions, catalogue: Catalogue, work: Work) -> int:
    with RankServer(preload=PRELOAD) as server:
        Watcher(catalogue, work, server, options.name).run()
    return 0


def _hint(options: HintOptions, catalogue: Catalogue, work: Work) -> int:
    print(reveal_hint(catalogue[options.name], work))
    return 0


def _reset(options: ResetOptions, catalogue: Catalogue, work: Work) -> int:
    backup = work.reset(catalogue[options.name])
    print(
        f"{work.file(catalogue[options.name])} is a new copy of the stub"
        + (f"; your version is kept as {backup}" if backup else "")
    )
    return 0


def _solution(options: SolutionOptions, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    if not options.anyway and not work.entry(exercise).get("passed"):
        raise UserError(f"you have not passed {exercise.name} yet; to see its solution all the same, add --anyway")
    print(exercise.solution.read_text(), end="")
    return 0


def _progress(options: ProgressOptions, catalogue: Catalogue, work: Work) -> int:
    entries = {name: (exercise, work.entry(exercise)) for name, exercise in catalogue.items()}
    for name, (exercise, entry) in entries.items():
        if entry:
            state = "passed, " if entry.get("passed") else ""
            points = f"{entry.get('points', 0)} of {exercise.points} points"
            print(f"{name:<26}{state}{points}, attempts: {entry.get('attempts', 0)}, hints: {entry.get('hints', 0)}")
    earned = sum(entry.get("points", 0) for _, entry in entries.values())
    print(f"total: {earned} of {sum(exercise.points for exercise in catalogue.values())} points")
    return 0


def _train(options: TrainOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    defer_sigterm()
    train(catalogue, work, list(options.only), rest)
    return 0


def _gate(options: GateOptions, catalogue: Catalogue, work: Work) -> int:
    chosen = [catalogue[name] for name in options.names] if options.names else list(catalogue.values())
    with RankServer(preload=PRELOAD) as server:
        if options.mutate:
            return 0 if mutate.run_mutants(chosen, server) else 1
        gate = Gate(server)
        server.ensure_ready()
        for exercise in chosen:
            start_s, before = time.perf_counter(), len(gate.problems)
            gate.run([exercise])
            state = "red" if len(gate.problems) > before else "green"
            print(f"{exercise.name:<26}{state:<6}{time.perf_counter() - start_s:6.1f} s", flush=True)
    if not chosen:
        gate.run([])
    print("\n".join(gate.problems) or f"{gate.checked} exercises, all green")
    return 0 if gate.green else 1


def _generate(options: GenerateOptions, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        for file in stubs.write_generated_files(exercise):
            print(file)
    return 0


def _new(options: NewOptions, catalogue: Catalogue, work: Work) -> int:
    for file in new.create_exercise(catalogue, options.name, options.chapter, options.piece):
        print(file)
    print(f"python -m exercises gate {options.name} lists what is missing; then add it to chapters/README.md")
    return 0


COMMANDS: dict[str, tuple[type, Callable[..., int]]] = {
    "start": (StartOptions, _start),
    "lab": (LabOptions, _lab),
    "update": (UpdateOptions, _start),
    "list": (ListOptions, _list),
    "check": (CheckOptions, _check),
    "watch": (WatchOptions, _watch),
    "hint": (HintOptions, _hint),
    "reset": (ResetOptions, _reset),
    "solution": (SolutionOptions, _solution),
    "progress": (ProgressOptions, _progress),
    "train": (TrainOptions, _train),
    "gate": (GateOptions, _gate),
    "new": (NewOptions, _new),
    "generate": (GenerateOptions, _generate),
}

if __name__ == "__main__":
    end_rank(main())
