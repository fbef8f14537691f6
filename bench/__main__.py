"""`python -m bench dp|zero|model|comm`, each with `--help`; `comm --calibrate` measures alpha, beta and gamma."""

import argparse
import sys
from collections.abc import Sequence

from bench import calibrate, comm, dp, model, zero
from minidist.tools.launch import RankServer

COMMANDS = {
    "dp": (dp.main, "data parallelism beside torch's DDP"),
    "zero": (zero.main, "ZeRO stages 1, 2 and 3 beside FSDP2, DeepSpeed and others"),
    "model": (model.main, "tensor parallelism and pipelines beside torch's"),
    "comm": (comm.main, "shm beside gloo; with --calibrate, alpha, beta and gamma"),
}


def main(arguments: Sequence[str] | None = None, server: RankServer | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a wrong request, 1 for a contender that computes wrongly.

    server: where the ranks come from; one of its own when None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:2] == ["comm", "--calibrate"]:
        return calibrate.main(arguments[2:], server)
    parser = argparse.ArgumentParser("python -m bench", description="minidist beside public systems, in paired rounds")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, told) in COMMANDS.items():
        commands.add_parser(name, help=told, add_help=False)
    chosen = parser.parse_args(arguments[:1])
    return COMMANDS[chosen.command][0](arguments[1:], server)


if __name__ == "__main__":
    sys.exit(main())
