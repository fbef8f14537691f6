"""The command line: `python -m exercises start`, `check block_partition`, ...

The commands gate, new and generate are for those who write exercises.
"""

import argparse
import json
import os
import select
import sys
import time
from pathlib import Path

from exercises import mutate, new, report, stubs
from exercises.attempt import attempt, hint, hints_left
from exercises.catalogue import ROOT, Catalogue
from exercises.check import PRELOAD, check, preload
from exercises.gate import Gate
from exercises.lab import lab
from exercises.train import train
from exercises.watch import Watcher
from exercises.work import Work
from minidist.errors import RunError, UserError
from minidist.tools.cli import complain
from minidist.tools.launch import RankServer
from minidist.tools.launch.torchrun import hold_sigterm

_READER_LEFT = 141  # as a shell tells of a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done or passed, 1 not passed, 2 impossible."""
    parser = _parser()
    options, options.rest = parser.parse_known_args(argv)
    if options.rest and options.command not in (_lab, _train):
        parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
    try:
        code = options.command(options, Catalogue(options.root), Work(options.work))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return _READER_LEFT
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _reader_left() -> bool:
    """Whether nobody reads what we print, as after `| head`; nothing is printed any more then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if poll.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end, too
        return True
    return False


def _start(options, catalogue: Catalogue, work: Work) -> int:
    done = work.update(catalogue)
    for what, files in done.items():
        for file in files:
            print(f"{what:<8}{file}" + ("  (you have edited it, and the course has a newer one)" * (what == "kept")))
    if not any(done.values()):
        print(f"{work.folder} has everything already")
    return 0


def _lab(options, catalogue: Catalogue, work: Work) -> int:
    _start(options, catalogue, work)
    sys.stdout.flush()  # what was told so far, before this process becomes another program
    lab(work, options.rest)
    return 0


def _list(options, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        mark = "passed" if work.entry(exercise).get("passed") else ""
        told = f"{exercise.points:>3} points {exercise.minutes:>4} min  difficulty {exercise.difficulty}"
        print(f"{exercise.section:<5}{exercise.name:<26}{told}  {mark:<7} {exercise.title}".rstrip())
    return 0


def _check(options, catalogue: Catalogue, work: Work) -> int:
    exercise = catalogue[options.name]
    with RankServer(preload=preload(exercise)) as server:
        if options.file:
            verdict = check(exercise, options.file, server)
            text = report.text(verdict, hints_left(exercise, work))
        else:
            verdict, text = attempt(exercise, work, server)
    print(json.dumps(report.as_json(verdict), indent=2) if options.json else text)
    return 0 if verdict.passed else 1


def _watch(options, catalogue: Catalogue, work: Work) -> int:
    with RankServer(preload=PRELOAD) as server:
        Watcher(catalogue, work, server, options.name).run()
    return 0


def _hint(options, catalogue: Catalogue, work: Work) -> int:
    print(hint(catalogue[options.name], work))
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


def _train(options, catalogue: Catalogue, work: Work) -> int:
    hold_sigterm()
    try:
        train(catalogue, work, options.only, options.rest)
    except (UserError, RunError) as error:
        complain(error, "exercises")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _gate(options, catalogue: Catalogue, work: Work) -> int:
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


def _generate(options, catalogue: Catalogue, work: Work) -> int:
    for exercise in catalogue.values():
        for file in stubs.generate(exercise):
            print(file)
    return 0


def _new(options, catalogue: Catalogue, work: Work) -> int:
    for file in new.create(catalogue, options.name, options.chapter, options.piece):
        print(file)
    print(f"python -m exercises gate {options.name} says what is still missing; then name it in chapters/README.md")
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
    command("lab", _lab, "start, and then JupyterLab on the learner's folder; options as of jupyter lab")
    command("update", _start, "copy what is new, and keep every edited file")
    command("list", _list, "all exercises")
    judge = command("check", _check, "judge your file", exercise=True)
    judge.add_argument("--json", action="store_true", help="the verdict for programs")
    judge.add_argument("--file", type=Path, help="judge this file instead, and record nothing")
    watch = command("watch", _watch, "judge every file that you save, one exercise after the other; Ctrl-C ends")
    watch.add_argument("name", nargs="?", help="the exercise to begin with; the first you have not passed")
    command("hint", _hint, "one more hint", exercise=True)
    command("reset", _reset, "the stub again; your file is kept beside it", exercise=True)
    solution = command("solution", _solution, "the package's own, and why it is so", exercise=True)
    solution.add_argument("--anyway", action="store_true", help="before you have passed")
    command("progress", _progress, "what you have so far")
    run = command("train", _train, "train the model with the pieces you have passed; options as of `minidist train`")
    run.add_argument("--only", action="append", default=[], metavar="NAME", help="this piece, and those named likewise")
    gate = command("gate", _gate, "the project's check of its own checks")
    gate.add_argument("names", nargs="*", help="exercises; all when none is named")
    gate.add_argument("--mutate", action="store_true", help="whether small mistakes in the solutions are seen")
    create = command("new", _new, "write every file of a new exercise about a piece of the package")
    create.add_argument("name", help="of the exercise and its files")
    create.add_argument("--chapter", required=True, help="its folder in exercises/, as ch03_communication")
    create.add_argument("--piece", required=True, metavar="MODULE:SYMBOL", help="what the learner writes")
    command("generate", _generate, "write stubs and solutions from the package's source")
    return parser


if __name__ == "__main__":
    sys.exit(main())
