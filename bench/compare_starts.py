"""`python -m bench start`: the time from the start of torchrun to the first training step, in seconds and CPU seconds.

Two programs show how much of it is not the trainer's: an empty one, and one that imports torch. The programs take
turns, so that a busy machine slows all of them down.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench import command_line
from bench.compare_restarts import BASELINES, make_torchrun_command, read_until, run_program
from bench.environment import describe_machine
from minidist.errors import UserError, format_count
from minidist.tools.launch import RankServer

_TRAIN = (
    *("-m", "minidist", "train", "--device", "cpu", "--train.steps", "1", "--train.eval-samples", "8"),
    *("--train.sample-tokens", "0", "--checkpoint.every", "0"),
)


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 failed run, 2 invalid options. server: not needed."""
    parser = argparse.ArgumentParser(
        "python -m bench start",
        description="Measure the time from the start of torchrun to the first training step.",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="number of ranks (default: %(default)s)")
    rounds_help = "starts of each program; they take turns (default: %(default)s)"
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help=rounds_help)
    command_line.add_output_options(parser, "start", "json")
    options = parser.parse_args(arguments)

    def run() -> None:
        for name in ("ranks", "rounds"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name} is {getattr(options, name)}; it must be at least 1")
        measured = measure_starts(options.ranks, options.rounds)
        _print_table(measured, options)
        results = {"machine": describe_machine("shm"), "ranks": options.ranks, "wall and CPU seconds": measured}
        command_line.write_json(options.json, results)

    return command_line.exit_code_of(run)


def measure_starts(ranks: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, CPU) seconds of each start, by program. CPU: of torchrun and all its processes together."""
    measured: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = {}
        for name, text in BASELINES.items():
            program = Path(folder) / f"{name.replace(' ', '_')}.py"
            program.write_text(text)
            programs[name] = [str(program)]
        for number in range(rounds):
            for name, program in (programs | {"minidist train": [*_TRAIN, "--folder", f"run-{number}"]}).items():
                start_s = time.monotonic()
                with run_program(make_torchrun_command(ranks, 0, *program), folder) as process:
                    read_until(process, "step")
                    measured.setdefault(name, []).append((time.monotonic() - start_s, cpu_seconds(process.pid)))
    return measured


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its descendants so far, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()
    ]
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def _print_table(measured: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    title = f"from the start to the first step: {format_count(options.ranks, 'rank')}, {options.rounds} starts each"
    table = Table("", "wall, median (s)", "least", "most", "CPU, median (s)", "least", "most", title=title)
    for name, pairs in measured.items():
        cells = [f"{of(values):.2f}" for values in zip(*pairs, strict=True) for of in (statistics.median, min, max)]
        table.add_row(name, *cells)
    command_line.make_console().print(table)
