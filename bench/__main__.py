"""`python -m bench COMMAND`, with one of `COMMANDS`: dp, zero, model and so on; each has its own `--help`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from minidist.tools.cli import run_to_exit_code
from minidist.tools.launch import RankServer

# The module of each command, and its summary. A module is imported when it runs: torch takes seconds.
COMMANDS = {
    "dp": ("compare_dp", "compare data parallelism with torch DDP, DeepSpeed and FairScale"),
    "zero": ("compare_zero", "compare ZeRO stages 1, 2 and 3 with torch FSDP2, DeepSpeed and FairScale"),
    "model": ("compare_model_parallel", "compare tensor and pipeline parallelism with torch's; context parallelism"),
    "comm": ("compare_backends", "compare minidist's shared-memory backend shm with gloo"),
    "recover": ("compare_recovery", "time from the death of a rank to the next step of the others (live recovery)"),
    "save": ("compare_saves", "compare checkpoints with torch's distributed checkpoint"),
    "restart": ("compare_restarts", "measure the time that a killed rank costs under torchrun"),
    "start": ("compare_starts", "measure the time from the start of torchrun to the first training step"),
    "local": ("compare_local_steps", "time local SGD and DiLoCo, over a slow link too, and torch's local SGD"),
    "diloco": ("compare_outer_steps", "compare DiLoCo's loss with synchronous training, over a grid of settings"),
    "watch": ("measure_watchdog", "measure what deadlock detection under torchrun costs, up to thousands of ranks"),
    "index": ("plan_index", "plan the index of a checkpoint of thousands of simulated ranks"),
    "calibrate": ("calibrate_link", "fit the cost model's alpha, beta and gamma to this machine"),
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
    return importlib.import_module(f"bench.{COMMANDS[command][0]}").main(arguments[1:], server)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run `main` as a program: SIGINT and SIGTERM end it, even if a shell started it in the background."""
    return run_to_exit_code(lambda: main(arguments), "bench")


if __name__ == "__main__":
    sys.exit(run())
