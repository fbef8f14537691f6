"""The command line: `minidist train|sample|parity|doctor`. Reads options, checks them, and hands over.

Whatever is wrong with what was asked for ends in one message and exit code 2, before any rank starts; a run that failed
ends in one message and exit code 1. Neither shows a traceback.
"""

import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from minidist import __version__
from minidist.errors import RunError, UserError

COMMANDS = {
    "train": "train a model on the ranks of this machine, or under torchrun",
    "sample": "text from a checkpoint",
    "parity": "compare every layout of N ranks with one process",
    "doctor": "what this machine can do, and what to fix",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"minidist {__version__}")
        return 0
    runners: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sample": _sample,
        "parity": _parity,
        "doctor": _doctor,
    }
    try:
        if argv[0] not in runners:
            raise UserError(f"there is no command {argv[0]!r}; possible: {', '.join(runners)} (minidist --help)")
        return runners[argv[0]](argv[1:])
    except (UserError, RunError) as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The commands, one line each."""
    lines = ["usage: minidist COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "minidist COMMAND --help lists the options of a command."])


def _complain(message: str) -> None:
    """One message on stderr; under torchrun, where every rank has the same one, only rank 0's."""
    from minidist.train.launch.torchrun import is_first_rank

    if is_first_rank():
        print(f"minidist: {message}", file=sys.stderr, flush=True)


def _parse(kind, name: str, argv: list[str], default=None):
    import tyro

    return tyro.cli(kind, prog=f"minidist {name}", args=argv, **({} if default is None else {"default": default}))


def _train(argv: list[str]) -> int:
    import tyro

    from minidist.config import Config, check
    from minidist.train.launch.torchrun import under_torchrun

    @dataclass(frozen=True)
    class TrainOptions:
        """Train a decoder-only transformer, by default on the sources of Python's standard library."""

        run: Annotated[Config, tyro.conf.arg(name="")]
        ranks: int | None = None
        """Ranks to start here; one per GPU, or two on the CPU, when not given. torchrun decides it itself."""
        config: Path | None = None
        """A TOML file with options; those on the command line win."""

    options = _parse(TrainOptions, "train", argv, default=TrainOptions(_base_config(argv)))
    if under_torchrun():
        return _train_under_torchrun(options.run, options.ranks)
    ranks = options.ranks if options.ranks is not None else _default_ranks(options.run)
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; at least 1 rank is needed.")
    check(options.run, ranks)
    return _train_here(options.run, ranks)


def _base_config(argv: list[str]):
    """Where options start from: the run to resume, else the TOML file, else the defaults."""
    from minidist.config import Config
    from minidist.configfile import from_toml
    from minidist.train.trainer import resumed_config

    base = Config()
    if resume := _value_of(argv, "--checkpoint.resume"):
        asked = dataclasses.replace(base.checkpoint, resume=Path(resume))
        base = resumed_config(dataclasses.replace(base, checkpoint=asked))
    if file := _value_of(argv, "--config"):
        base = from_toml(Path(file), base)
    return base


def _value_of(argv: list[str], option: str) -> str | None:
    """The value given to an option that must be known before the others can be read."""
    for i, word in enumerate(argv):
        if word == option and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(option + "="):
            return word.split("=", 1)[1]
    return None


def _default_ranks(config) -> int:
    if config.device == "cpu":
        return 2
    import torch

    return torch.cuda.device_count() or 2


def _train_here(config, ranks: int) -> int:
    from minidist.train.launch import RankServer, forward_signals
    from minidist.train.trainer import train

    with RankServer() as server:
        job = server.start(
            train,
            ranks,
            (config,),
            backend=config.comm.backend,
            device=config.device,
            capture=False,
            timeout_s=config.comm.timeout_s,
        )
        with forward_signals(job, signal.SIGINT, signal.SIGTERM):
            job.wait()
    return 0


def _train_under_torchrun(config, ranks: int | None) -> int:
    from minidist.config import check
    from minidist.train.launch.torchrun import torchrun_size, torchrun_world
    from minidist.train.trainer import train

    if ranks is not None:
        raise UserError(f"--ranks {ranks} under torchrun, which starts the ranks itself: leave --ranks out.")
    check(config, torchrun_size())
    with torchrun_world(config.device, config.comm.backend, config.comm.timeout_s) as world:
        train(world, config)
    return 0


def _sample(argv: list[str]) -> int:
    from minidist.train.sample import SampleOptions, sample

    print(sample(_parse(SampleOptions, "sample", argv)))
    return 0


def _parity(argv: list[str]) -> int:
    from minidist.parity.command import ParityOptions
    from minidist.parity.command import main as parity

    return parity(_parse(ParityOptions, "parity", argv))


def _doctor(argv: list[str]) -> int:
    from minidist.doctor import DoctorOptions, doctor

    return doctor(_parse(DoctorOptions, "doctor", argv))
