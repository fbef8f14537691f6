"""`python -m bench recover`: time from SIGKILL of a rank to the next completed step.

The run is a real one, in processes of its own; this program reads its lines, kills a rank, and waits for the line of
the first step that was completed after the failure. With `--torchft`, torchft's data-parallel example on gloo runs in
the same rounds, with a model of the same size (`torchft_replica`).
"""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from bench import command_line
from bench.bootstrap import paired_interval
from bench.environment import describe_machine
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

_LIMIT_S = 1.5  # wanted of live recovery
_DEADLINE_S = 300.0
_KILL_AFTER_STEP = 30
_MODEL = (
    *("--model.hidden-size", "64", "--model.intermediate-size", "128", "--model.num-layers", "2"),
    *("--data.source", "synthetic", "--data.seq-len", "64", "--train.global-batch", "16", "--train.steps", "100000"),
    *("--train.log-every", "1", "--train.eval-every", "0", "--checkpoint.every", "10", "--device", "cpu"),
)
BACKENDS = ("gloo", "shm")
TORCHFT = "torchft, gloo"
# With the options of torchft's example, but for the time after which a replica without heartbeat counts as dead: 5 s
# by default, which would be all that is measured.
_HEARTBEAT_TIMEOUT_MS = 1000
_LIGHTHOUSE = (
    "from torchft.coordination import LighthouseServer as Server; import sys; server = Server(bind='127.0.0.1:0', "
    f"min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10000, heartbeat_timeout_ms={_HEARTBEAT_TIMEOUT_MS}); "
    "print(server.address(), flush=True); sys.stdin.read()"
)
_GOES_ON = re.compile(r"\d+ ranks? goe?s? on")


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 failed run, 2 invalid options. server: not used."""
    options = _parse_options(arguments)

    def run(_: RankServer) -> None:
        if options.rounds < 1 or options.ranks < 2:
            raise UserError(f"--rounds {options.rounds} --ranks {options.ranks}: at least 1 round and 2 ranks.")
        contenders: dict[str, Callable[[], float]] = {
            name: lambda name=name: time_recovery(name, options.ranks) for name in BACKENDS
        }
        if options.torchft and importlib.util.find_spec("torchft") is None:
            command_line.make_console().print("torchft is left out: it is not installed (pip install torchft)")
        elif options.torchft:
            contenders[TORCHFT] = lambda: time_torchft_recovery(options.ranks)
        times_s: dict[str, list[float]] = {name: [] for name in contenders}
        for _round in range(options.rounds):
            for name, measure in contenders.items():
                times_s[name].append(measure())
        _report(times_s, options.ranks)
        header = {"machine": describe_machine("gloo"), "ranks": options.ranks}
        command_line.write_json(options.json, header | {"seconds": times_s})

    return command_line.exit_code(run, server)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser("python -m bench recover", description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="number of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="deaths per backend (default: %(default)s)")
    parser.add_argument("--torchft", action="store_true", help="also time torchft's DDP example, if it is installed")
    command_line.add_output_options(parser, "recover", "json")
    return parser.parse_args(arguments)


def time_recovery(backend: str, ranks: int) -> float:
    """Start a run, kill its last rank in training, and return the seconds until the line of the next new step."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*_MODEL, "--folder", str(Path(folder) / "run")]
        command = ["-m", "minidist", "train", "--ranks", str(ranks), "--fault.live-recovery"]
        command += ["--comm.backend", backend]
        process = subprocess.Popen(
            [sys.executable, "-u", *command, *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _kill_and_time_next_step(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # its ranks end with it
            process.stdout.close()
            process.wait()


def _kill_and_time_next_step(process: subprocess.Popen) -> float:
    """Kill the last rank of a running `process`; return the seconds until the next step, as its output shows."""
    killed_at_s, is_restarted, lines = None, False, []
    start_s = time.monotonic()
    for line in process.stdout:
        lines.append(line)
        step = re.match(r"step\s+(\d+)\s+loss", line)
        if killed_at_s is None:
            if step and int(step[1]) >= _KILL_AFTER_STEP:
                server = _children(process.pid)[0]
                killed_at_s = time.monotonic()
                os.kill(max(_children(server)), signal.SIGKILL)
        elif _GOES_ON.match(line):
            is_restarted = True
        elif is_restarted and step:
            return time.monotonic() - killed_at_s
        if time.monotonic() - start_s > _DEADLINE_S:
            break
    raise RunError("the run did not go on:\n" + "".join(lines[-20:]))


def time_torchft_recovery(replicas: int) -> float:
    """Train `replicas` replicas with torchft, kill the last, and return the seconds until the next step of the others.

    The time ends with the first step that is committed by one replica less.
    """
    with contextlib.ExitStack() as ended:

        def start(*program: str, **environ: str) -> subprocess.Popen:
            process = subprocess.Popen(
                [sys.executable, "-u", *program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=os.environ | {"RUST_LOG": "error", "GLOO_SOCKET_IFNAME": "lo"} | environ,
            )  # fmt: skip
            ended.callback(process.__exit__, None, None, None)  # waits for it
            ended.callback(process.kill)
            return process

        address = start("-c", _LIGHTHOUSE).stdout.readline().strip()
        program = ("-m", "bench.torchft_replica")
        processes = [
            start(*program, str(number), str(replicas), TORCHFT_LIGHTHOUSE=address) for number in range(replicas)
        ]
        # A replica whose output nobody reads would stop once the pipe is full.
        for process in processes[1:]:
            threading.Thread(target=process.stdout.read, daemon=True).start()
        killed_at_s, num_whole, start_s = None, 0, time.monotonic()
        for line in processes[0].stdout:
            if found := re.match(r"step \d+ replicas (\d+)$", line):
                num_whole += int(found[1]) == replicas
                if killed_at_s is None and num_whole >= _KILL_AFTER_STEP:
                    killed_at_s = time.monotonic()
                    processes[-1].kill()
                elif killed_at_s is not None and int(found[1]) < replicas:
                    return time.monotonic() - killed_at_s
            if time.monotonic() - start_s > _DEADLINE_S:
                break
        raise RunError(f"the run of torchft did not go on, after {num_whole} steps of all replicas")


def _children(pid: int) -> list[int]:
    """Return the process ids of the children of a process, which may have been started by any of its threads."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def _report(times_s: dict[str, list[float]], ranks: int) -> None:
    """Print the table of times, by backend, and the ratio to torchft if it was measured."""
    table = Table("backend", "median", "least", "most", f"wanted, {ranks} ranks", title="SIGKILL to the next step")
    for name, seconds in times_s.items():
        values = (f"{value:.2f} s" for value in (np.median(seconds), min(seconds), max(seconds)))
        table.add_row(name, *values, f"<= {_LIMIT_S} s" if name in BACKENDS else "")
    console = command_line.make_console()
    console.print(table)
    if TORCHFT in times_s:
        console.print(f"minidist on gloo / torchft: {paired_interval(times_s['gloo'], times_s[TORCHFT])}, wanted < 1")
