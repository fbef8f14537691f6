"""What the commands of `python -m bench` have in common: options, the terminal, where figures go, how they end."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from bench import report
from bench.contest import Run
from bench.workload import SIZES
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

WIDTH = 130  # characters, where the output is no terminal
RESULTS = Path(__file__).parent / "results"


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def exit_code(run: Callable[[RankServer], None], server: RankServer | None) -> int:
    """Run it on ranks of the server, one of its own when None: 0; 2 for a wrong request, 1 for what went wrong."""
    try:
        with contextlib.nullcontext(server) if server else RankServer() as ranks_from:
            run(ranks_from)
    except (UserError, RunError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def add_outputs(parser: argparse.ArgumentParser, name: str, *kinds: str) -> None:
    """`--json FILE` and `--picture FILE`, those of them that are asked for."""
    for kind, what, suffix in (("json", "figures go", "json"), ("picture", "picture goes", "png")):
        if kind in kinds:
            told = f"where the {what} (default: bench/results/{name}.{suffix})"
            parser.add_argument(f"--{kind}", type=Path, default=RESULTS / f"{name}.{suffix}", help=told)


def write(path: Path, figures: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


# -- contests: contenders in turns (bench/contest.py) ------------------------------------------------------------------


def contest_parser(name: str, description: str, contenders: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m bench {name}", description=description)
    add = parser.add_argument
    add("--ranks", type=int, action="append", help="number of ranks, may be repeated (default: 2 and 4)")
    add("--rounds", type=int, default=20, help="turns of every contender (default: %(default)s)")
    add("--steps", type=int, default=2, help="steps per turn (default: %(default)s)")
    add("--only", action="append", metavar="NAME", help=f"contenders, may be repeated: {', '.join(contenders)}")
    add("--size", choices=SIZES, default="default", help="of the model (default: 5.25M parameters)")
    add("--no-memory", action="store_true", help="measure time only")
    add_outputs(parser, name, "json", "picture")
    return parser


def check(options: argparse.Namespace, contenders: Iterable[str]) -> None:
    """Fill in what was left out. Raises UserError for what cannot be measured, before any rank starts."""
    options.ranks, options.only = options.ranks or [2, 4], options.only or list(contenders)
    batch = SIZES[options.size].global_batch
    for ranks in options.ranks:
        if not 2 <= ranks <= batch:
            raise UserError(
                f"--ranks {ranks}: a comparison needs 2 ranks or more, and at most one per sample ({batch})"
            )
    for name, value in (("rounds", options.rounds), ("steps", options.steps)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    for name in options.only:
        if name not in contenders:
            raise UserError(f"--only {name!r} is no contender; possible: {', '.join(contenders)}")


def run_contests(
    options: argparse.Namespace,
    contests: Iterable[Callable[[], Run]],
    verdict: Callable[[Run], Iterable[str]],
    backend: str = "gloo",
) -> None:
    """Run one contest after the other, print each result at once, and write all results to a file and a picture."""
    work, runs, terminal = SIZES[options.size], [], console()
    title = report.heading(work, options.rounds, options.steps, backend)
    terminal.print(title, highlight=False, soft_wrap=True)
    for contest in contests:
        runs.append(contest())
        report.print_run(runs[-1], verdict(runs[-1]), terminal)
    write(options.json, report.as_json(runs, verdict, work, options.rounds, options.steps, backend))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    report.draw(runs, title, options.picture)
    terminal.print(f"figures in {options.json}, picture in {options.picture}", highlight=False, soft_wrap=True)
