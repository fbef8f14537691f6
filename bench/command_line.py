"""Options, output and exit codes that the commands of `python -m bench` have in common."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from bench import contender_report
from bench.compare_contenders import Comparison
from bench.workload import WORKLOADS
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

WIDTH = 130  # characters, if the output is not a terminal
RESULTS = Path(__file__).parent / "results"


def make_console() -> Console:
    """Return a console as wide as the terminal, or WIDTH characters if the output is redirected."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def exit_code(run: Callable[[RankServer], None], server: RankServer | None) -> int:
    """Call `run(server)` and return the command's exit code; print an error as one line on stderr.

    0: done. 1: RunError. 2: UserError. server: None starts a new rank server for this call.
    """

    def run_with_server() -> None:
        with contextlib.nullcontext(server) if server else RankServer() as rank_server:
            run(rank_server)

    return exit_code_of(run_with_server)


def exit_code_of(run: Callable[[], None]) -> int:
    """Call `run()` and return the exit code as `exit_code` does; for a command without ranks."""
    try:
        run()
    except (UserError, RunError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def add_output_options(parser: argparse.ArgumentParser, command: str, *kinds: str) -> None:
    """Add the options `--json FILE` and `--picture FILE`. kinds: those to add, "json" or "picture"."""
    for kind in kinds:
        file = RESULTS / f"{command}.{'json' if kind == 'json' else 'png'}"
        written = "all measurements as JSON" if kind == "json" else "the plot"
        help_text = f"write {written} to this file (default: bench/results/{file.name})"
        parser.add_argument(f"--{kind}", type=Path, default=file, metavar="FILE", help=help_text)


def write_json(path: Path, results: dict) -> None:
    """Write results to a JSON file; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


# -- commands that compare contenders in turns -------------------------------------------------------------------------


def comparison_parser(command: str, description: str, contenders: Iterable[str]) -> argparse.ArgumentParser:
    """Make the option parser of a command that compares these contenders."""
    parser = argparse.ArgumentParser(f"python -m bench {command}", description=description)
    add = parser.add_argument
    add("--ranks", type=int, action="append", metavar="N", help="number of ranks; may be repeated (default: 2 and 4)")
    rounds_help = "rounds to measure; every contender takes one turn per round (default: %(default)s)"
    add("--rounds", type=int, default=20, metavar="N", help=rounds_help)
    add("--steps", type=int, default=2, metavar="N", help="training steps per turn (default: %(default)s)")
    only_help = f"measure only this contender; may be repeated; one of: {', '.join(contenders)}"
    add("--only", action="append", metavar="NAME", help=only_help)
    size_help = "size of the model: default (5.25 million parameters) or tiny, for a test run"
    add("--size", choices=WORKLOADS, default="default", help=size_help)
    add("--no-memory", action="store_true", help="do not measure memory, only time")
    add_output_options(parser, command, "json", "picture")
    return parser


def validate(options: argparse.Namespace, contenders: Iterable[str]) -> None:
    """Fill in defaults of `ranks` and `only`. Raises UserError for invalid options, before any rank starts."""
    options.ranks, options.only = options.ranks or [2, 4], options.only or list(contenders)
    batch = WORKLOADS[options.size].global_batch
    for ranks in options.ranks:
        if not 2 <= ranks <= batch:
            raise UserError(f"--ranks {ranks}: the comparison needs 2 to {batch} ranks, one per sample at most")
    for name, value in (("rounds", options.rounds), ("steps", options.steps)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    for name in options.only:
        if name not in contenders:
            raise UserError(f"--only {name!r}: there is no such contender; possible: {', '.join(contenders)}")


def run_comparisons(
    options: argparse.Namespace,
    comparisons: Iterable[Callable[[], Comparison]],
    verdicts: Callable[[Comparison], Iterable[str]],
    backend: str = "gloo",
) -> None:
    """Run comparisons one after the other, print each result at once, then write all results as JSON and as a plot."""
    work, results, console = WORKLOADS[options.size], [], make_console()
    title = contender_report.title(work, options.rounds, options.steps, backend)
    console.print(title, highlight=False, soft_wrap=True)
    for compare in comparisons:
        results.append(compare())
        contender_report.print_comparison(results[-1], verdicts(results[-1]), console)
    write_json(options.json, contender_report.as_json(results, verdicts, work, options.rounds, options.steps, backend))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    contender_report.plot(results, title, options.picture)
    console.print(f"results in {options.json}, plot in {options.picture}", highlight=False, soft_wrap=True)
