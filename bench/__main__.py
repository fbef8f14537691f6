"""`python -m bench dp --ranks 2 --ranks 4 --json FILE --picture FILE`; `comm` (bench/comm.py), with `--calibrate`
(bench/calibrate.py); `model` (bench/model.py).
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import calibrate, comm, dp, model, report
from bench.contenders import MODES
from bench.lineup import LINEUP
from bench.workload import Workload
from minidist.errors import RunError, UserError
from minidist.models import ModelConfig
from minidist.train.launch import RankServer

WIDTH = 130  # characters, where the output is no terminal
RESULTS = Path(__file__).parent / "results"
SIZES = {
    "default": Workload(),
    "tiny": Workload(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, max_seq_len=32, tie_embeddings=False),
        seq_len=32,
        min_length=16,
    ),
}


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a wrong request, 1 for a contender that computes wrongly.

    server: where the ranks come from; one of its own when None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:2] == ["comm", "--calibrate"]:
        return calibrate.main(arguments[2:], server)
    if arguments[:1] == ["comm"]:
        return comm.main(arguments[1:], server)
    if arguments[:1] == ["model"]:
        return model.main(arguments[1:], server)
    options = _parse(arguments)
    try:
        _check(options)
        with contextlib.nullcontext(server) if server else RankServer() as ranks_from:
            _run_dp(options, ranks_from)
    except (UserError, RunError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description="minidist beside public systems, in paired rounds")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("comm", help="shm beside gloo; with --calibrate, alpha, beta and gamma", add_help=False)
    commands.add_parser("model", help="tensor parallelism and pipelines beside torch's", add_help=False)
    command = commands.add_parser("dp", help="data parallelism")
    add = command.add_argument
    add("--ranks", type=int, action="append", help="number of ranks, may be repeated (default: 2 and 4)")
    add(
        "--mode",
        choices=MODES,
        action="append",
        help="full: what a trainer does; bare: no clip, no log (default: both)",
    )
    add("--rounds", type=int, default=20, help="turns of every contender (default: %(default)s)")
    add("--steps", type=int, default=2, help="steps per turn (default: %(default)s)")
    add("--only", action="append", metavar="NAME", help=f"contenders, may be repeated: {', '.join(LINEUP)}")
    add("--size", choices=SIZES, default="default", help="of the model (default: 5.25M parameters)")
    add("--no-memory", action="store_true", help="measure time only")
    add("--json", type=Path, default=RESULTS / "dp.json", help="where the figures go (default: bench/results/dp.json)")
    add("--picture", type=Path, default=RESULTS / "dp.png", help="where the picture goes (default: .../dp.png)")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for what cannot be measured, before any rank starts."""
    options.ranks, options.mode = options.ranks or [2, 4], options.mode or list(MODES)
    batch = SIZES[options.size].global_batch
    for ranks in options.ranks:
        if not 2 <= ranks <= batch:
            raise UserError(
                f"--ranks {ranks}: a comparison needs 2 ranks or more, and at most one per sample ({batch})"
            )
    for name, value in (("rounds", options.rounds), ("steps", options.steps)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    options.only = options.only or list(LINEUP)
    for name in options.only:
        if name not in LINEUP:
            raise UserError(f"--only {name!r} is no contender; possible: {', '.join(LINEUP)}")


def _run_dp(options: argparse.Namespace, server: RankServer) -> None:
    work, runs = SIZES[options.size], []
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    title = report.heading(work, options.rounds, options.steps)
    console.print(title, highlight=False, soft_wrap=True)
    for ranks, mode in itertools.product(options.ranks, options.mode):
        run = dp.compare(server, work, ranks, mode, options.rounds, options.steps, options.only, not options.no_memory)
        report.print_run(run, console)
        runs.append(run)
    for path in (options.json, options.picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(dp.as_json(runs, work, options.rounds, options.steps), indent=1) + "\n")
    report.draw(runs, title, options.picture)
    console.print(f"figures in {options.json}, picture in {options.picture}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
