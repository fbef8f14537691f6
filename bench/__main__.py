"""`python -m bench dp|zero|model|comm|recover|save|restart|local|index|watch|calibrate`; each has its own `--help`."""

import argparse
import sys
from collections.abc import Sequence

from bench import (
    calibrate_link,
    compare_backends,
    compare_dp,
    compare_local_steps,
    compare_model_parallel,
    compare_recovery,
    compare_restarts,
    compare_saves,
    compare_zero,
    measure_watchdog,
    plan_index,
)
from minidist.tools.cli import run_to_exit_code
from minidist.tools.launch import RankServer

COMMANDS = {
    "dp": (compare_dp.main, "compare data parallelism with torch DDP, DeepSpeed and FairScale"),
    "zero": (compare_zero.main, "compare ZeRO stages 1, 2 and 3 with torch FSDP2, DeepSpeed and FairScale"),
    "model": (compare_model_parallel.main, "compare tensor and pipeline parallelism with torch DTensor and pipelining"),
    "comm": (compare_backends.main, "compare minidist's shared-memory backend shm with gloo"),
    "recover": (compare_recovery.main, "time from the death of a rank to the next step of the others (live recovery)"),
    "save": (compare_saves.main, "compare checkpoints with torch's distributed checkpoint"),
    "restart": (compare_restarts.main, "measure the time that a killed rank costs under torchrun"),
    "local": (compare_local_steps.main, "time local SGD and DiLoCo, over a slow link too, and torch's local SGD"),
    "watch": (measure_watchdog.main, "measure what deadlock detection under torchrun costs, up to thousands of ranks"),
    "index": (plan_index.main, "plan the index of a checkpoint of thousands of simulated ranks"),
    "calibrate": (calibrate_link.main, "fit the cost model's alpha, beta and gamma to this machine"),
}


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run one benchmark command; return the exit code: 0 done, 2 invalid options, 1 failed run or wrong contender.

    server: launches the ranks; None starts a new rank server.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    description = "Benchmark minidist against other training libraries on this machine."
    parser = argparse.ArgumentParser("python -m bench", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    return COMMANDS[command][0](arguments[1:], server)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run `main` as a program: SIGINT and SIGTERM end it, even if a shell started it in the background."""
    return run_to_exit_code(lambda: main(arguments), "bench")


if __name__ == "__main__":
    sys.exit(run())
