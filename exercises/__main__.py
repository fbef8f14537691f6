"""The command line: `python -m exercises start`, `check block_partition`, ...; the project's are gate and generate."""

import argparse
import json
import sys
import time
from pathlib import Path

from exercises import report, stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.check import PRELOAD, check
from exercises.gate import Gate
from exercises.work import Work
from minidist.errors import RunError, UserError
from minidist.train.launch import RankServer


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done or passed, 1 not passed, 2 impossible."""
    options = _parser().parse_args(argv)
    try:
        return options.command(options, Catalogue(options.root), Work(options.work))
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _start(options, catalogue: Catalogue, work: Work) -> int:
    done = work.update(catalogue)
    for what, files in done.items():
        for file in files:
            print(f"{what:<8}{file}" + ("  (you have edited it, and the course has a newer one)" * (what == "kept")))
    if not any(done.values()):
        print(f"{work.folder} has everything already")
    return 0


def _list(options, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        mark = "passed" if work.entry(exercise).get("passed") else ""
        told = f"{exercise.points:>3} points {exercise.minutes:>4} min  difficulty {exercise.difficulty}"
        print(f"{exercise.section:<5}{exercise.name:<26}{told}  {mark:<7} {exercise.title}".rstrip())
    return 0


def _check(options, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    answer = options.file or work.file(exercise)
    if not answer.is_file():
        raise UserError(f"{answer} is not there; python -m exercises start copies the stubs to {work.folder}")
    with RankServer(preload=PRELOAD) as server:
        verdict = check(exercise, answer, server)
    if not options.file:
        work.record(exercise, verdict.passed, verdict.points)
    left = len(exercise.hints) - work.entry(exercise).get("hints", 0)
    print(json.dumps(report.as_json(verdict), indent=2) if options.json else report.text(verdict, left))
    return 0 if verdict.passed else 1


def _hint(options, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    shown = work.next_hint(exercise)
    for number, hint in enumerate(exercise.hints[:shown], start=1):
        print(f"hint {number} of {len(exercise.hints)}: {hint}")
    return 0


def _reset(options, catalogue: Catalogue, work: Work) -> int:
    backup = work.reset(catalogue[options.name])
    print(f"{work.file(catalogue[options.name])} is the stub again" + (f"; yours is {backup}" if backup else ""))
    return 0


def _solution(options, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    if not options.anyway and not work.entry(exercise).get("passed"):
        raise UserError(f"you have not passed {exercise.name} yet; to see its solution all the same, add --anyway")
    print(exercise.solution.read_text(), end="")
    return 0


def _progress(options, catalogue: Catalogue, work: Work) -> int:
    entries = {name: (exercise, work.entry(exercise)) for name, exercise in catalogue.items()}
    for name, (exercise, entry) in entries.items():
        if entry:
            told = f"{entry.get('points', 0)} of {exercise.points} points, {entry.get('attempts', 0)} attempts"
            print(f"{name:<26}{'passed, ' if entry.get('passed') else ''}{told}, {entry.get('hints', 0)} hints")
    earned = sum(entry.get("points", 0) for _, entry in entries.values())
    print(f"{earned} of {sum(exercise.points for exercise in catalogue.values())} points")
    return 0


def _gate(options, catalogue: Catalogue, work: Work) -> int:
    chosen = [catalogue[name] for name in options.names] if options.names else list(catalogue.values())
    with RankServer(preload=PRELOAD) as server:
        gate = Gate(server)
        for exercise in chosen:
            start_s, before = time.perf_counter(), len(gate.problems)
            gate.run([exercise])
            state = "red" if len(gate.problems) > before else "green"
            print(f"{exercise.name:<26}{state:<6}{time.perf_counter() - start_s:6.1f} s", flush=True)
    if not chosen:
        gate.run([])
    print("\n".join(gate.problems) or f"{gate.checked} exercises, all green")
    return 0 if gate.green else 1


def _generate(options, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        for file in stubs.generate(exercise):
            print(file)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m exercises", description="The exercises of the course.")
    parser.add_argument("--work", type=Path, default=ROOT / "work", help="the learner's folder")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, function, text: str, exercise: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(command=function)
        if exercise:
            sub.add_argument("name", help="an exercise, as `list` names it")
        return sub

    command("start", _start, "copy the stubs and notebooks to the learner's folder")
    command("update", _start, "copy what is new, and keep every edited file")
    command("list", _list, "all exercises")
    judge = command("check", _check, "judge your file", exercise=True)
    judge.add_argument("--json", action="store_true", help="the verdict for programs")
    judge.add_argument("--file", type=Path, help="judge this file instead, and record nothing")
    command("hint", _hint, "one more hint", exercise=True)
    command("reset", _reset, "the stub again; your file is kept beside it", exercise=True)
    solution = command("solution", _solution, "the package's own, and why it is so", exercise=True)
    solution.add_argument("--anyway", action="store_true", help="before you have passed")
    command("progress", _progress, "what you have so far")
    gate = command("gate", _gate, "the project's check of its own checks")
    gate.add_argument("names", nargs="*", help="exercises; all when none is named")
    command("generate", _generate, "write stubs and solutions from the package's source")
    return parser


if __name__ == "__main__":
    sys.exit(main())
