"""The command line: `python -m exercises start`, `check block_partition`, ...

The commands gate, new and generate are for those who write exercises.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from exercises import (
    class_report,
    generated_mistakes,
    grade,
    made_class,
    mutate,
    new,
    parity_gate,
    release,
    report,
    stubs,
    trial,
)
from exercises.attempt import grade_attempt, hints_left, reveal_hint
from exercises.catalogue import ROOT, Catalogue
from exercises.certificate import DEFAULT_RANKS, make_certificate
from exercises.check import PRELOAD, check, modules_to_preload
from exercises.exercise_display import update_stored_displays
from exercises.gate import Gate
from exercises.jupyterlab import start_jupyterlab
from exercises.layouts import LAYOUT_PRELOAD, count_calls, layouts_that_call, read_layouts, write_layouts
from exercises.learner_pieces import read_piece
from exercises.parity import print_parity
from exercises.submissions import read_submissions
from exercises.train import passed_pieces, train
from exercises.watch import Watcher
from exercises.work import Work
from minidist.errors import UserError, format_count, suggest
from minidist.tools.cli import format_usage, run_to_exit_code
from minidist.tools.launch import RankServer
from minidist.tools.launch.threads import usable_cores
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
class ParityOptions(_Options):
    """Compare the layouts that call your passed exercises with one process, your code in place of the package's."""

    only: tuple[str, ...] = ()
    """Only these exercises; without it all that have passed and that training runs call."""
    ranks: int = 2
    """Ranks of the layouts."""


@dataclass(frozen=True)
class CertificateOptions(_Options):
    """Prove and train the whole trainer with your functions, and write a certificate of what was measured.

    Files that changed since their last verdict are checked again. Layouts with your functions are compared with one
    process in float64; a flipped bit is repaired; then the model trains under torchrun with your functions, and with
    the fast engine beside it. All together takes less than three minutes on two idle cores. The exit code is 1 if a
    layout differs.
    """

    ranks: int = DEFAULT_RANKS
    """Ranks of the hybrid layout: 8 (pipeline, data and tensor parallelism, two each), 4 or 2, which take less time."""
    out: Path | None = None
    """The page; a .json with all numbers is written beside it. By default certificate.html in your folder."""


@dataclass(frozen=True)
class GradeOptions(_Options):
    """For instructors: check the answers of a class in a sandbox. Give the command again to go on where it stopped."""

    folder: Annotated[Path, POSITIONAL]
    """The submissions: a folder or a zip file per student, named after the student."""
    exercises: tuple[str, ...] = ()
    """Grade only these exercises. By default all."""
    csv: Path | None = None
    """Write the records to this file, one line per check."""
    json: Path | None = None
    """Write the points of each student and the records to this file."""
    report: Path | None = None
    """Write a report about the class to this .html or .md file."""
    sandbox: Literal["auto", "bubblewrap", "user", "none"] = "auto"
    """How the submissions are kept from your files: bubblewrap, a separate user (as root only), or not at all."""
    jobs: int | None = None
    """How many checks run at the same time. By default one more than there are cores."""
    make_class: int | None = None
    """Do not grade, but write so many made submissions to the folder, from the course's right and wrong answers."""


@dataclass(frozen=True)
class ReleaseOptions(_Options):
    """For instructors: write a copy of the course for students, without solutions and answers, to a new folder."""

    folder: Annotated[Path, POSITIONAL]
    """The new folder."""
    exercises: tuple[str, ...] = ()
    """The exercises that Gradescope and GitHub Classroom grade. By default all."""
    gradescope: Path | None = None
    """Write a zip file for Gradescope's autograder, too."""
    torch_index: str = ""
    """Address of the package index with torch's CPU build, for both graders' machines (as TORCH_INDEX for make CPU=1).
    By default pip's own index, with the CUDA build."""


@dataclass(frozen=True)
class GateOptions(_Options):
    """For authors: test the graders of exercises with right and wrong answers, and run these in the simple trainer."""

    names: Annotated[tuple[str, ...], POSITIONAL] = ()
    """The exercises. By default all."""
    mutate: bool = False
    """Test with small mutations of the solutions instead, which the tests must notice."""
    mistakes: bool = False
    """Test with mistakes that are the same for all exercises instead, each made in every solution."""
    conditions: bool = False
    """Count instead how many wrong answers each kind of condition refuses, without the exercises' own tests."""
    parity: bool = False
    """Only train a layout of the simple trainer with each right answer, and with wrong ones until one is noticed."""
    trial: Path | None = None
    """Test with the right and wrong answers in this folder instead, of authors who have not seen the tests."""


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
    """For authors: generate stubs and solutions from the package's source, and the exercises shown in notebooks."""


@dataclass(frozen=True)
class LayoutsOptions(_Options):
    """For authors: count which exercises each layout of the simple trainer calls, and write layouts.toml."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done or passed, 1 not passed or failed, 2 invalid request."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(words), "exercises")


def _run(words: list[str]) -> int:
    """Parse the words of a command line and run its command; return the exit code."""
    leading = []  # options before the command
    while words and words[0].partition("=")[0] in ("--work", "--root"):
        count = 1 if "=" in words[0] else 2
        leading, words = [*leading, *words[:count]], words[count:]
    if not words or words[0] in ("-h", "--help"):
        print(format_usage(_PROGRAM, {name: _command_summary(kind) for name, (kind, _) in COMMANDS.items()}))
        return 0 if words else 2
    if words[0] not in COMMANDS:
        guess = suggest(words[0], COMMANDS)
        raise UserError(f"there is no command {words[0]!r}; {guess} {_PROGRAM} --help lists them.")
    kind, command = COMMANDS[words[0]]
    passes_on = command in (_lab, _train)
    read = parse_options(kind, f"{_PROGRAM} {words[0]}", [*leading, *words[1:]], keep_unknown=passes_on)
    options, rest = read if passes_on else (read, [])
    catalogue, work = Catalogue(options.root), Work(options.work)
    if release.is_student_copy(catalogue.root) and command in _FOR_AUTHORS:
        raise UserError(f"{words[0]} needs the solutions and answers, which this student's copy of the course lacks")
    return command(options, catalogue, work, rest) if passes_on else command(options, catalogue, work)


def _command_summary(kind: type) -> str:
    """Return the first sentence of a command's docstring, for the list of commands."""
    return kind.__doc__.partition(". ")[0].rstrip(".")


def _start(options: _Options, catalogue: Catalogue, work: Work) -> int:
    _update(options, catalogue, work)
    exercise = work.next_exercise(catalogue)
    if exercise is not None:
        print(
            f"next: {_PROGRAM} lab opens the course in JupyterLab. Without JupyterLab, edit\n"
            f"{_relative_to_cwd(work.file(exercise))} and check it: {_PROGRAM} check {exercise.name}"
        )
    return 0


def _update(options: _Options, catalogue: Catalogue, work: Work) -> int:
    done = work.update(catalogue)
    changes = []
    for action in ("added", "renewed"):
        suffixes = [file.suffix for file in done[action]]
        numbers = ((suffixes.count(".py"), "exercise"), (suffixes.count(".ipynb"), "notebook"))
        some = [format_count(number, noun) for number, noun in numbers if number]
        if some := some or [file.name for file in done[action]]:
            changes.append(f"{' and '.join(some)} {action}")
    if changes or not done["kept"]:
        print(f"{_relative_to_cwd(work.folder)}: {', '.join(changes) or 'up to date'}")
    for file in done["kept"]:
        print(f"kept {_relative_to_cwd(file)}: you have edited it; the course has a newer version")
    return 0


def _relative_to_cwd(path: Path) -> Path:
    """Return the path relative to the current folder if it lies below, else unchanged."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _lab(options: LabOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    _update(options, catalogue, work)
    sys.stdout.flush()  # before JupyterLab replaces this process
    start_jupyterlab(work, rest)
    return 0


def _list(options: ListOptions, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        mark = "passed" if work.entry(exercise).get("passed") else ""
        facts = f"{exercise.points:>3} points {exercise.minutes:>4} min  difficulty {exercise.difficulty}"
        title = f"{exercise.title} (optional)" if exercise.optional else exercise.title
        print(f"{exercise.section:<5}{exercise.name:<26}{facts}  {mark:<7} {title}".rstrip())
    return 0


def _check(options: CheckOptions, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    with RankServer(preload=modules_to_preload([exercise])) as server:
        if options.file:
            verdict = check(exercise, options.file, server)
            text = report.format_verdict(verdict, hints_left(exercise, work))
        else:
            verdict, text = grade_attempt(exercise, work, server)
    print(json.dumps(report.as_json(verdict), indent=2) if options.json else text)
    return 0 if verdict.passed else 1


def _watch(options: WatchOptions, catalogue: Catalogue, work: Work) -> int:
    with RankServer(preload=modules_to_preload(catalogue.values())) as server:
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
    earned, extra = (
        sum(entry.get("points", 0) for exercise, entry in entries.values() if exercise.optional is optional)
        for optional in (False, True)
    )
    more = f", and {extra} for optional exercises" if extra else ""
    print(f"total: {earned} of {sum(each.points for each in catalogue.values() if not each.optional)} points{more}")
    return 0


def _train(options: TrainOptions, catalogue: Catalogue, work: Work, rest: list[str]) -> int:
    defer_sigterm()
    train(catalogue, work, list(options.only), rest)
    return 0


def _parity(options: ParityOptions, catalogue: Catalogue, work: Work) -> int:
    layouts, passed = read_layouts(catalogue.root), passed_pieces(catalogue, work, options.only)
    chosen = [each for each in passed if options.only or layouts_that_call(each.name, layouts)]
    if not chosen:
        raise UserError("no training run calls a piece that you have passed; python -m exercises list shows all")
    with RankServer() as server:
        equal = [print_parity(exercise, read_piece(exercise, work), options.ranks, server) for exercise in chosen]
    print("every layout equals one process" if all(equal) else "some layouts differ from one process, or could not run")
    return 0 if all(equal) else 1


def _certificate(options: CertificateOptions, catalogue: Catalogue, work: Work) -> int:
    file = work.folder / "certificate.html" if options.out is None else options.out
    return 0 if make_certificate(catalogue, work, options.ranks, file) else 1


def _grade(options: GradeOptions, catalogue: Catalogue, work: Work) -> int:
    chosen = [catalogue[name] for name in options.exercises] if options.exercises else list(catalogue.values())
    if options.make_class is not None:
        made = made_class.make_class(catalogue, options.folder, options.make_class)
        print(f"{len(made)} made submissions in {options.folder}")
        return 0
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is not possible; give at least 1")
    if options.report is not None:
        class_report.check_report_name(options.report)
    submissions = read_submissions(options.folder, catalogue)
    records = grade.Records(options.folder.resolve().with_name(f"{options.folder.resolve().name}.grades.jsonl"))
    grader = grade.Grader(catalogue, records, options.sandbox, options.jobs or usable_cores() + 1)
    print("\n".join(grader.protections), file=sys.stderr)
    try:
        with grade.show_progress(len(submissions) * len(chosen)) as on_record:
            grader.run(submissions, chosen, on_record)
    except BaseException:
        print(f"stopped; the same command goes on. The records are in {records.file}", file=sys.stderr)
        raise
    done = records.of(submissions, chosen)
    if options.csv:
        grade.write_csv(done, options.csv)
    if options.json:
        grade.write_json(done, options.json, grader.course, grader.protections)
    if options.report:
        class_report.write_report(options.report, submissions, chosen, done)
    for name, (points, of) in grade.totals(done).items():
        print(f"{name:<30}{points:>5} of {of} points")
    errors = [record for record in done if record.verdict == "error"]
    for record in errors:
        print(f"{record.student} {record.exercise}: not graded: {record.message}", file=sys.stderr)
    print(f"{format_count(len(done), 'check')}, {len(errors)} not graded; the records are in {records.file}")
    return 1 if errors else 0


def _release(options: ReleaseOptions, catalogue: Catalogue, work: Work) -> int:
    chosen = [catalogue[name] for name in options.exercises] if options.exercises else list(catalogue.values())
    if options.gradescope is not None:
        release.check_zip_name(options.gradescope)
    release.write_release(catalogue, options.folder, chosen, options.torch_index)
    print(f"the copy for students: {options.folder}")
    print(f"GitHub Classroom's workflow: {options.folder / '.github/workflows/classroom.yml'}")
    if options.gradescope is not None:
        release.write_gradescope(options.folder, options.gradescope, options.exercises, options.torch_index)
        print(f"Gradescope's autograder: {options.gradescope}")
    return 0


def _gate(options: GateOptions, catalogue: Catalogue, work: Work) -> int:
    others = (options.mutate, options.mistakes, options.conditions, options.parity, options.trial is not None)
    if sum(others) > 1:
        told = "--mutate, --mistakes, --conditions, --parity and --trial"
        raise UserError(f"{told} are gates of their own; give one at a time")
    chosen = [catalogue[name] for name in options.names] if options.names else list(catalogue.values())
    if options.trial is not None:
        with tempfile.TemporaryDirectory(prefix="minidist-gate-") as folder:
            return 0 if trial.run_trial(options.trial, chosen, Path(folder)) else 1
    if options.parity:
        with RankServer() as server:
            return 0 if parity_gate.run_parity_gate(chosen, server) else 1
    with RankServer(preload=modules_to_preload(chosen)) as server:
        if options.mutate:
            return 0 if mutate.run_mutants(chosen, server) else 1
        if options.mistakes or options.conditions:
            from exercises.condition_report import run_conditions  # it imports torch, which a check can do without

            run = generated_mistakes.run_mistakes if options.mistakes else run_conditions
            with tempfile.TemporaryDirectory(prefix="minidist-gate-") as folder:
                return 0 if run(chosen, server, Path(folder)) else 1
        gate = Gate(server)
        server.ensure_ready()
        for exercise in chosen:
            start_s, before = time.perf_counter(), len(gate.problems)
            gate.run([exercise])
            in_trainer = parity_gate.judge_in_trainer(exercise, server)
            gate.problems += in_trainer.problems
            state = "red" if len(gate.problems) > before else "green"
            elapsed_s = time.perf_counter() - start_s
            print(f"{exercise.name:<28}{state:<6}{elapsed_s:6.1f} s  in the trainer: {in_trainer}", flush=True)
    if not chosen:
        gate.run([])
    print("\n".join(gate.problems) or f"{format_count(gate.checked, 'exercise')}, all green")
    return 0 if gate.green else 1


def _generate(options: GenerateOptions, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        for file in stubs.write_generated_files(exercise):
            print(file)
    for file in update_stored_displays(catalogue):
        print(file)
    return 0


def _layouts(options: LayoutsOptions, catalogue: Catalogue, work: Work) -> int:
    with RankServer(preload=(*PRELOAD, *LAYOUT_PRELOAD)) as server:
        print(write_layouts(count_calls(catalogue, server), catalogue.root))
    return 0


def _new(options: NewOptions, catalogue: Catalogue, work: Work) -> int:
    for file in new.create_exercise(catalogue, options.name, options.chapter, options.piece):
        print(file)
    print(f'Replace each text that begins with "{new.UNWRITTEN.strip()}", run python -m exercises generate,')
    print(f"and add a row to chapters/README.md; python -m exercises gate {options.name} lists what is missing")
    return 0


COMMANDS: dict[str, tuple[type, Callable[..., int]]] = {
    "start": (StartOptions, _start),
    "lab": (LabOptions, _lab),
    "update": (UpdateOptions, _update),
    "list": (ListOptions, _list),
    "check": (CheckOptions, _check),
    "watch": (WatchOptions, _watch),
    "hint": (HintOptions, _hint),
    "reset": (ResetOptions, _reset),
    "solution": (SolutionOptions, _solution),
    "progress": (ProgressOptions, _progress),
    "train": (TrainOptions, _train),
    "parity": (ParityOptions, _parity),
    "certificate": (CertificateOptions, _certificate),
    "grade": (GradeOptions, _grade),
    "release": (ReleaseOptions, _release),
    "gate": (GateOptions, _gate),
    "new": (NewOptions, _new),
    "generate": (GenerateOptions, _generate),
    "layouts": (LayoutsOptions, _layouts),
}

_FOR_AUTHORS = (_solution, _grade, _release, _gate, _new, _generate, _layouts)

if __name__ == "__main__":
    end_rank(main())
