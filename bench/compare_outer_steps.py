"""`python -m bench diloco`: the held-out loss of DiLoCo beside synchronous training, over a grid of settings.

Each finished run is a line of a JSON-lines file. A run whose line is there already is not repeated, so that the command
continues after an interruption, and prints the table of everything in the file.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench import command_line
from minidist.config import Config
from minidist.errors import UserError
from minidist.tools.consistency.comparison import PRELOAD, run_on_live_ranks
from minidist.tools.consistency.comparison_options import ConsistencyOptions, Mode, plan_modes
from minidist.tools.launch import RankServer

FILE = Path(__file__).parents[1] / "docs" / "diloco_grid.jsonl"
SEEDS = 3


class Setup(NamedTuple):
    """What the runs of one table have in common: the text, the model, the batch and the inner learning rate."""

    text: str
    parameters: int
    ranks: int
    global_batch: int
    seq_len: int
    lr: float

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"{self.text}, {self.parameters:,} parameters, {self.ranks} ranks, {self.global_batch} x {self.seq_len} "
            f"tokens per step, inner learning rate {self.lr:g}"
        )


class Cell(NamedTuple):
    """The settings of a row of the table. Synchronous runs have h = 1 and no outer settings."""

    steps: int
    h: int = 1
    outer_lr: float | None = None
    outer_momentum: float | None = None
    exchange: str | None = None


@dataclass(frozen=True)
class Run:
    """One run of the grid: a setup, an inner optimizer, a cell of the grid, and a seed."""

    setup: Setup
    optimizer: str
    cell: Cell
    seed: int


@dataclass(frozen=True)
class Result:
    """What a run gave: held_out_loss in nats per token; sent_bytes in all steps, counted, of the busiest rank."""

    held_out_loss: float
    sent_bytes: int


Results = dict[Run, Result]


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 failed run, 2 invalid options. server: launches the ranks."""
    options = _parse_options(arguments)

    def run() -> None:
        configs, results = plan_runs(options), read_results(options.file)
        missing = [run for run in configs if run not in results]
        print(f"{len(configs)} runs, of which {len(configs) - len(missing)} are in {options.file}", flush=True)
        if missing:
            with nullcontext(server) if server else RankServer(preload=PRELOAD) as rank_server:
                for number, one in enumerate(missing, start=1):
                    results[one] = measure_run(one, configs[one], rank_server)
                    append_result(options.file, one, results[one])
                    print(
                        f"{number} of {len(missing)}: {_describe_run(one)}: {results[one].held_out_loss:.4f}",
                        flush=True,
                    )
        print("", *format_tables(results), sep="\n")

    return command_line.exit_code_of(run)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        "python -m bench diloco",
        description="Train a small model with DiLoCo in every combination of the options, and synchronously with the "
        "same inner optimizer and number of steps; print a table of the held-out losses.",
    )

    def add(name: str, kind: type, default: list, help_text: str, choices: Sequence[str] | None = None) -> None:
        shown = " ".join(map(str, default))
        help_text += f" (default: {shown})"
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, choices=choices, help=help_text)

    add("optimizer", str, ["adamw", "muon"], "inner optimizers", ["adamw", "muon"])
    add("steps", int, [120], "lengths of the runs, in steps")
    add("h", int, [10, 40], "steps between two merges")
    add("outer-lr", float, [0.7, 1.0], "learning rates of the outer step")
    add("outer-momentum", float, [0.0, 0.5, 0.9], "Nesterov momenta of the outer step")
    add("exchange", str, ["full"], "how differences are sent", ["full", "int8"])
    small = ConsistencyOptions()
    add("text", str, [small.run.data.source], "training texts", ["synthetic", "stdlib"])
    add("lr", float, [small.run.optim.lr], "peak learning rates of the inner optimizer")
    add("ranks", int, [small.ranks], "numbers of ranks; each is a replica")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each combination (default: %(default)s)")
    file_help = "JSON-lines file of the finished runs (default: docs/diloco_grid.jsonl)"
    parser.add_argument("--file", type=Path, default=FILE, help=file_help)
    return parser.parse_args(arguments)


def plan_runs(options: argparse.Namespace) -> dict[Run, Config]:
    """Return the configuration of each run of the grid, all synchronous runs first. Raises UserError."""
    if not options.file.absolute().parent.is_dir():
        raise UserError(f"--file {options.file}: there is no folder {options.file.absolute().parent}. Make it first.")
    planned: dict[Run, Config] = {}
    setups = list(itertools.product(options.text, options.lr, options.ranks, options.steps, options.optimizer))
    for setup in setups:
        planned |= _plan_seeds(options.seeds, *setup, modes=("synchronous",))
    outer = itertools.product(options.h, options.outer_lr, options.outer_momentum, options.exchange)
    for (h, outer_lr, outer_momentum, exchange), setup in itertools.product(outer, setups):
        how = {"h": h, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "exchange": exchange}
        planned |= _plan_seeds(options.seeds, *setup, modes=("diloco",), **how)
    return planned


def _plan_seeds(
    seeds: int,
    text: str,
    lr: float,
    ranks: int,
    steps: int,
    optimizer: str,
    modes: tuple[str, ...],
    **consistency: float | str,
) -> Iterator[tuple[Run, Config]]:
    """Yield the runs of one cell, by seed."""
    small = ConsistencyOptions().run
    config = dataclasses.replace(
        small,
        data=dataclasses.replace(small.data, source=text),
        optim=dataclasses.replace(small.optim, kind=optimizer, lr=lr),
        consistency=dataclasses.replace(small.consistency, **consistency),
    )
    comparison = ConsistencyOptions(run=config, modes=modes, ranks=ranks, seeds=seeds, steps=steps)
    [mode], _ = plan_modes(comparison)
    for seed in range(config.train.seed, config.train.seed + seeds):
        train = dataclasses.replace(mode.config.train, seed=seed)
        yield _make_run(mode, ranks, seed), dataclasses.replace(mode.config, train=train)


def _make_run(mode: Mode, ranks: int, seed: int) -> Run:
    """Return the run of the grid that a mode, a number of ranks and a seed stand for."""
    config, how = mode.config, mode.config.consistency
    data, train = config.data, config.train
    setup = Setup(data.source, config.model.num_parameters(), ranks, train.global_batch, data.seq_len, config.optim.lr)
    cell = Cell(train.steps)
    if how.mode == "diloco":
        cell = Cell(train.steps, how.h, how.outer_lr, how.outer_momentum, how.exchange)
    return Run(setup, config.optim.kind, cell, seed)


def _describe_run(run: Run) -> str:
    """Return one line of text about a run."""
    cell = run.cell
    how = "synchronous"
    if cell.outer_lr is not None:
        how = f"h {cell.h}, outer {cell.outer_lr:g} and {cell.outer_momentum:g}, {cell.exchange}"
    return f"{run.setup.text}, {run.optimizer}, {cell.steps} steps, {how}, seed {run.seed}"


def measure_run(run: Run, config: Config, server: RankServer) -> Result:
    """Train once on live ranks."""
    with tempfile.TemporaryDirectory(prefix="minidist-diloco-") as folder:
        records = run_on_live_ranks(config, run.setup.ranks, server, Path(folder))
    return Result(records[0]["held_out_loss"], max(record["sent_bytes"] for record in records))


# -- the file ----------------------------------------------------------------------------------------------------------


def append_result(path: Path, run: Run, result: Result) -> None:
    """Append the line of a finished run, and write it to the disk."""
    row = {"optimizer": run.optimizer, **run.setup._asdict(), **run.cell._asdict(), "seed": run.seed, **asdict(result)}
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_results(path: Path) -> Results:
    """Return the finished runs of a file; none if there is no file. Raises UserError for a line that is not a run."""
    results: Results = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        try:
            row = json.loads(line)
            setup, cell = (kind(**{name: row[name] for name in kind._fields}) for kind in (Setup, Cell))
            result = Result(row["held_out_loss"], row["sent_bytes"])
            results[Run(setup, row["optimizer"], cell, row["seed"])] = result
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--file {path}: line {number} is not a finished run: {line[:60]!r}. Delete that line; its run is "
                "then repeated."
            ) from None
    return results


# -- the table ---------------------------------------------------------------------------------------------------------


def format_tables(results: Results) -> list[str]:
    """Return the lines of a Markdown table for each setup: rows by steps and outer settings, a column per optimizer."""
    lines: list[str] = []
    for setup in sorted({run.setup for run in results}, key=lambda setup: (setup.text != "synthetic", setup)):
        lines += [*([""] if lines else []), f"{setup.describe()}:", "", *_format_table(results, setup)]
    return lines


def _format_table(results: Results, setup: Setup) -> Iterator[str]:
    """Yield the lines of the Markdown table for one setup."""
    losses: dict[tuple[str, Cell], dict[int, float]] = defaultdict(dict)
    sent: dict[Cell, int] = {}
    for run, result in results.items():
        if run.setup == setup:
            losses[run.optimizer, run.cell][run.seed] = result.held_out_loss
            sent[run.cell] = max(result.sent_bytes, sent.get(run.cell, 0))
    optimizers = sorted({optimizer for optimizer, _ in losses})
    columns = ["steps", "h", "outer rate", "outer momentum", *optimizers, "sent per rank"]
    yield _markdown_row(columns)
    yield _markdown_row(["---"] * len(columns))
    for cell in sorted(sent, key=lambda cell: (cell.steps, cell.h, cell.exchange or "", cell.outer_lr or 0.0, cell)):
        synchronous = cell.outer_lr is None
        own = [losses[optimizer, cell] for optimizer in optimizers]
        if synchronous:
            settings, shown = ["synchronous", "", ""], [_format_losses(of.values()) for of in own]
        else:
            first = [losses[optimizer, Cell(cell.steps)] for optimizer in optimizers]
            settings = [f"{cell.h}" + ", int8" * (cell.exchange == "int8"), f"{cell.outer_lr:g}"]
            settings.append(f"{cell.outer_momentum:g}")
            shown = [format_change(of, to) for of, to in zip(own, first, strict=True)]
        yield _markdown_row([f"{cell.steps:,}", *settings, *shown, f"{sent[cell] / 1e6:.2f} MB"])


def _markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _format_losses(losses: Iterable[float]) -> str:
    """Return the mean loss over seeds as text, "-" without any."""
    losses = list(losses)
    return f"{statistics.mean(losses):.4f}{_format_seeds(len(losses))}" if losses else "-"


def format_change(losses: dict[int, float], synchronous: dict[int, float]) -> str:
    """Format the change of the mean loss, and its range over single seeds: of the seeds that both have."""
    seeds = sorted(losses.keys() & synchronous.keys())
    if not seeds:
        return "-"
    changes = [100 * (losses[seed] / synchronous[seed] - 1) for seed in seeds]
    mean = 100 * (sum(losses[seed] for seed in seeds) / sum(synchronous[seed] for seed in seeds) - 1)
    return f"{mean:+.1f} % [{min(changes):+.1f}, {max(changes):+.1f}]{_format_seeds(len(seeds))}"


def _format_seeds(count: int) -> str:
    """Return a remark if the number of seeds is not the usual one, else ""."""
    return "" if count == SEEDS else f" ({count} seed{'s' * (count > 1)})"
