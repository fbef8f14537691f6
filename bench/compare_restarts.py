"""`python -m bench restart`: the time from SIGKILL of a rank to the first new step under torchrun.

An empty program, which torchrun restarts in the same way, shows how much of it is torchrun's own, and one that only
imports torch, how much every program that trains must add.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from bench import command_line
from bench.environment import describe_machine
from minidist.errors import RunError, UserError, format_count
from minidist.tools.launch import RankServer

LIMIT_S = 2.0  # wanted: at most this long beyond an empty program
DEADLINE_S = 600.0  # of all kills of a program
_ROOT = Path(__file__).resolve().parents[1]
_EMPTY_PROGRAM = "import os, time\nif os.environ['RANK'] == '0': os.write(1, b'step\\n')\ntime.sleep(1000)\n"
BASELINES = {"empty program": _EMPTY_PROGRAM, "import torch": f"import torch\n{_EMPTY_PROGRAM}"}
_TRAIN = (
    *("-m", "minidist", "train", "--device", "cpu", "--train.steps", "1000000", "--train.log-every", "1"),
    *("--train.eval-every", "0", "--checkpoint.every", "20"),
)


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 failed run, 2 invalid options. server: not needed."""
    options = _parse_options(arguments)

    def run(_: RankServer) -> None:
        _check_options(options)
        times_s = measure_restarts(options.ranks, options.rounds, options.train)
        results = {"machine": describe_machine("shm"), "ranks": options.ranks, "seconds": times_s}
        command_line.write_json(options.json, results | {"beyond torchrun's own": _report(times_s, options)})

    return command_line.exit_code(run, server)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    description = "Measure the time from SIGKILL of a rank to the first new step under torchrun."
    parser = argparse.ArgumentParser("python -m bench restart", description=description)
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="number of ranks (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="kills of each program (default: %(default)s)")
    train_help = "further options of `minidist train`, as one word: --train='--zero.stage 3'"
    add("--train", type=str.split, default=[], metavar="OPTIONS", help=train_help)
    command_line.add_output_options(parser, "restart", "json")
    return parser.parse_args(arguments)


def _check_options(options: argparse.Namespace) -> None:
    """Raise UserError for invalid options."""
    for name, least in (("ranks", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name)}; it must be at least {least}")


def measure_restarts(ranks: int, rounds: int, train: Sequence[str] = ()) -> dict[str, list[float]]:
    """Return the seconds from SIGKILL of a rank to the first new step, of each baseline and of "minidist train".

    train: further options of `minidist train`. The programs are measured one after the other.
    """
    times_s = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in BASELINES.items():
            program = Path(folder) / f"{name.replace(' ', '_')}.py"
            program.write_text(text)
            command = make_torchrun_command(ranks, rounds, str(program))
            times_s[name] = measure_recovery(command, folder, "step", ["step"], rounds)
        command = make_torchrun_command(ranks, rounds, *_TRAIN, "--folder", "run", *train)
        resumed = ["going on after step", "step "]
        times_s["minidist train"] = measure_recovery(command, folder, "checkpoint: ", resumed, rounds)
    return times_s


def make_torchrun_command(ranks: int, restarts: int, *program: str) -> list[str]:
    """Return the command that runs `program` under torchrun. restarts: `--max-restarts`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--max-restarts", str(restarts), *program]


def last_rank(pid: int) -> int:
    """Return the process id of the newest child of process `pid`: under torchrun, the last rank."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()
    ]
    if not children:
        raise RunError(f"process {pid} has no child to kill")
    return max(children)


def measure_recovery(
    command: Sequence[str],
    folder: str | Path,
    ready: str,
    recovered: Sequence[str],
    rounds: int,
    choose_victim: Callable[[int], int] = last_rank,
) -> list[float]:
    """Start a program and kill one of its processes `rounds` times; return the seconds from each kill to the recovery.

    folder: the program's working directory. ready: how a line begins after which the process is killed. recovered: how
    lines begin that the program prints after the kill, in this order; the last one ends the measurement. choose_victim:
    takes the process id of the program and returns the one to kill. Raises RunError if a line does not come in time.
    """
    times_s = []
    with run_program(command, folder) as process:
        for _ in range(rounds):
            read_until(process, ready)
            victim, kill_time = choose_victim(process.pid), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            for line in recovered:
                read_until(process, line)
            times_s.append(time.monotonic() - kill_time)
    return times_s


@contextlib.contextmanager
def run_program(command: Sequence[str], folder: str | Path) -> Iterator[subprocess.Popen]:
    """Context manager for a running program, which is killed at the end of the block, or after `DEADLINE_S`."""
    mark = uuid.uuid4().hex  # in the environment of the program and of all processes that it starts
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}
    environ["MINIDIST_BENCH"] = mark
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = threading.Timer(DEADLINE_S, process.terminate)
        deadline.start()
        try:
            yield process
        finally:
            deadline.cancel()
            process.terminate()
            reader = threading.Thread(target=process.stdout.read)  # a process that fills the pipe could not end
            reader.start()
            process.wait()
            # torchrun ends its ranks, but not those that it was about to start; they would keep the pipe open.
            for pid in _processes_with(mark.encode()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reader.join()


def _processes_with(variable: bytes) -> Iterator[int]:
    """Yield the process ids of this user's processes whose environment contains `variable`."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in file.read_bytes():
                yield int(file.parent.name)


def read_until(process: subprocess.Popen, start: str) -> None:
    """Read lines up to the first that begins with `start`. Raises RunError, with the last lines, if there is none."""
    last: deque[str] = deque(maxlen=20)
    for line in process.stdout:
        if line.startswith(start):
            return
        last.append(line)
    raise RunError(f"the program ended, or took more than {DEADLINE_S:g} s, before {start!r}:\n{''.join(last)}")


def _report(times_s: dict[str, list[float]], options: argparse.Namespace) -> dict:
    """Print a table and the difference that has a target; return the difference."""
    console = command_line.make_console()
    table = Table(
        "",
        "median (s)",
        "least (s)",
        "most (s)",
        title=f"{format_count(options.ranks, 'rank')}, {format_count(options.rounds, 'kill')} each",
    )
    for name, seconds in times_s.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    console.print(table)
    empty, ours = (statistics.median(times_s[name]) for name in ("empty program", "minidist train"))
    verdict = "met" if ours - empty <= LIMIT_S else "MISSED"
    console.print(
        f"from SIGKILL to the first new step, beyond an empty program: {ours - empty:.2f} s, "
        f"target <= {LIMIT_S:g} s: {verdict}",
        highlight=False,
    )
    return {"median_s": ours - empty, "limit_s": LIMIT_S}


if __name__ == "__main__":
    sys.exit(main())
