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
from exercises.attempt import attempt, hint, hints_left
from exercises.catalogue import ROOT, Catalogue
from exercises.check import PRELOAD, check, preload
from exercises.gate import Gate
from exercises.lab import lab
from exercises.train import train
from exercises.watch import Watcher
from exercises.work import Work
from minidist.errors import UserError, suggest
from minidist.tools.cli import exit_code, usage
from minidist.tools.launch import RankServer
from minidist.tools.launch.torchrun import hold_sigterm
from minidist.tools.options import HIDDEN, POSITIONAL, parse_options

_PROGRAM = "python -m exercises"


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of every command."""

    work: Path = ROOT / "work"
    """The learner's folder."""
    root: Annotated[Path, HIDDEN] = ROOT
    """The repository."""


@dataclass(frozen=True)
class StartOptions(_Options):
    """Copy the notebooks and the exercises to work/, where you edit them."""


@dataclass(frozen=True)
class LabOptions(_Options):
    """Copy what is new, then start JupyterLab on work/. Other options go to jupyter lab."""


@dataclass(frozen=True)
class UpdateOptions(_Options):
    """Copy new and changed files of the course to work/, and keep every file that you have edited."""


@dataclass(frozen=True)
class ListOptions(_Options):
    """List all exercises."""


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
    """Check every file when you save it, one exercise after the other. Ctrl-C ends it."""

    name: Annotated[str | None, POSITIONAL] = None
    """The exercise to begin with; the first that you have not passed when not given."""


@dataclass(frozen=True)
class HintOptions(_Options):
    """Show the next hint."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""


@dataclass(frozen=True)
class ResetOptions(_Options):
    """Begin an exercise again from its stub; your file is kept beside it as a backup."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""


@dataclass(frozen=True)
class SolutionOptions(_Options):
    """Show the package's own code, and why it is written that way."""

    name: Annotated[str, POSITIONAL]
    """The exercise."""
    anyway: bool = False
    """Show it although you have not passed the exercise."""


@dataclass(frozen=True)
class ProgressOptions(_Options):
    """Show your points, attempts and hints so far."""


@dataclass(frozen=True)
class TrainOptions(_Options):
    """Train the model with the code that you have passed. Other options are those of minidist train."""

    only: tuple[str, ...] = ()
    """Use only your code of these exercises, and the package's own for the rest."""


@dataclass(frozen=True)
class GateOptions(_Options):
    """For authors: check the checks, with right and wrong answers."""

    names: Annotated[tuple[str, ...], POSITIONAL] = ()
    """The exercises; all when not given."""
    mutate: bool = False
    """Report whether the checks notice small mutations of the solutions."""


@dataclass(frozen=True)
class NewOptions(_Options):
    """For authors: write every file of a new exercise about a symbol of the package."""

    name: Annotated[str, POSITIONAL]
    """Name of the exercise and of its files."""
    chapter: str
    """Its folder in exercises/, such as ch03_communication."""
    piece: str
    """What the learner writes, as MODULE:SYMBOL."""


@dataclass(frozen=True)
class GenerateOptions(_Options):
    """For authors: write stubs and solutions from the package's source."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done or passed, 1 not passed or failed, 2 impossible."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words), "exercises")


def _run(words: list[str]) -> int:
    ahead = []  # options before the command
    while words and words[0].partition("=")[0] in ("--work", "--root"):
        count = 1 if "=" in words[0] else 2
        ahead, words = [*ahead, *words[:count]], words[count:]
    if not words or words[0] in ("-h", "--help"):
        print(usage(_PROGRAM, {name: _summary(kind) for name, (kind, _) in COMMANDS.items()}))
        return 0 if words else 2
    if words[0] not in COMMANDS:
        guess = suggest(words[0], COMMANDS)
        raise UserError(f"there is no command {words[0]!r}; {guess} {_PROGRAM} --help lists them.")
    kind, command = COMMANDS[words[0]]
    passes_on = command in (_lab, _train)
    read = parse_options(kind, f"{_PROGRAM} {words[0]}", [*ahead, *words[1:]], keep_unknown=passes_on)
    options, rest = read if passes_on else (read, [])
    catalogue, work = Catalogue(options.root), Work(options.work)
    return command(options, catalogue, work, rest) if passes_on else command(options, catalogue, work)


def _summary(kind: type) -> str:
    return kind.__doc__.partition(". ")[0].rstrip(".")


def _start(options: _Options, catalogue: Catalogue, work: Work) -> int:
    done = work.update(catalogue)
    for what, files in done.items():
        for file in files:
            print(f"{what:<8}{file}" + ("  (you have edited it; the course has a newer version)" * (what == "kept")))
    if not any(done.values()):
        print(f"{work.folder} is up to date")
    return 0


def _lab(options: LabOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    _start(options, catalogue, work)
    sys.stdout.flush()  # what was told so far, before this process becomes another program
    lab(work, rest)
    return 0


def _list(options: ListOptions, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        mark = "passed" if work.entry(exercise).get("passed") else ""
        told = f"{exercise.points:>3} points {exercise.minutes:>4} min  difficulty {exercise.difficulty}"
        print(f"{exercise.section:<5}{exercise.name:<26}{told}  {mark:<7} {exercise.title}".rstrip())
    return 0


def _check(options: CheckOptions, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    with RankServer(preload=preload(exercise)) as server:
        if options.file:
            verdict = check(exercise, options.file, server)
            text = report.text(verdict, hints_left(exercise, work))
        else:
            verdict, text = attempt(exercise, work, server)
    print(json.dumps(report.as_json(verdict), indent=2) if options.json else text)
    return 0 if verdict.passed else 1


def _watch(options: WatchOptions, catalogue: Catalogue, work: Work) -> int:
    with RankServer(preload=PRELOAD) as server:
        Watcher(catalogue, work, server, options.name).run()
    return 0


def _hint(options: HintOptions, catalogue: Catalogue, work: Work) -> int:
    print(hint(catalogue[options.name], work))
    return 0


def _reset(options: ResetOptions, catalogue: Catalogue, work: Work) -> int:
    backup = work.reset(catalogue[options.name])
    print(f"{work.file(catalogue[options.name])} is the stub again" + (f"; yours is {backup}" if backup else ""))
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
            told = f"{entry.get('points', 0)} of {exercise.points} points, {entry.get('attempts', 0)} attempts"
            print(f"{name:<26}{'passed, ' if entry.get('passed') else ''}{told}, {entry.get('hints', 0)} hints")
    earned = sum(entry.get("points", 0) for _, entry in entries.values())
    print(f"{earned} of {sum(exercise.points for exercise in catalogue.values())} points")
    return 0


def _train(options: TrainOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    hold_sigterm()
    train(catalogue, work, list(options.only), rest)
    return 0


def _gate(options: GateOptions, catalogue: Catalogue, work: Work) -> int:
    chosen = [catalogue[name] for name in options.names] if options.names else list(catalogue.values())
    with RankServer(preload=PRELOAD) as server:
        if options.mutate:
            return 0 if mutate.run(chosen, server) else 1
        gate = Gate(server)
        server.wait_until_ready()
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
        for file in stubs.generate(exercise):
            print(file)
    return 0


def _new(options: NewOptions, catalogue: Catalogue, work: Work) -> int:
    for file in new.create(catalogue, options.name, options.chapter, options.piece):
        print(file)
    print(f"python -m exercises gate {options.name} says what is still missing; then name it in chapters/README.md")
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
    sys.exit(main())
