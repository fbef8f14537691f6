"""The command line: `minidist train`, `estimate`, `doctor`, ... Reads options, checks them, and hands over.

Whatever is wrong with what was asked for ends in one message and exit code 2, before any rank starts; a run that failed
ends in one message and exit code 1. Neither shows a traceback.
"""

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from minidist import __version__
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from minidist.config import Config

COMMANDS = {
    "train": "train a model on the ranks of this machine, or under torchrun",
    "sample": "text from a checkpoint",
    "parity": "compare every layout of N ranks with one process",
    "estimate": "what a layout costs: memory, bytes sent, FLOPs, bubble",
    "simulate": "time a pipeline schedule: its bubble, its memory, a drawing",
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
        "estimate": _estimate,
        "simulate": _simulate,
        "doctor": _doctor,
    }
    from minidist.tools.launch.torchrun import hold_sigterm

    hold_sigterm()
    try:
        if argv[0] not in runners:
            close = difflib.get_close_matches(argv[0], runners, 1)
            guess = f"did you mean {close[0]}?" if close else f"possible: {', '.join(runners)}"
            raise UserError(f"there is no command {argv[0]!r}; {guess} (minidist --help)")
        return runners[argv[0]](argv[1:])
    except (UserError, RunError) as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The commands, one line each."""
    lines = ["usage: minidist COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "minidist COMMAND --help lists the options of a command."])


def complain(error: UserError | RunError, name: str = "minidist") -> None:
    """One message on stderr. Under torchrun rank 0 speaks for all; another rank only of what rank 0 does not have."""
    from minidist.tools.launch.torchrun import is_first_rank, let_first_rank_tell, own_rank

    if is_first_rank():
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return
    first_has_ended = let_first_rank_tell()
    # An operation fails on those whose peer died: rank 0 may be the one that can say nothing any more.
    if not first_has_ended or (isinstance(error, RunError) and error.of_some_ranks):
        print(f"{name}: rank {own_rank()}: {error}", file=sys.stderr, flush=True)


def _parse(kind, name: str, argv: list[str], default=None):
    import tyro

    from minidist.tools.launch.torchrun import is_first_rank, let_first_rank_tell

    more = {} if default is None else {"default": default}
    try:
        return tyro.cli(kind, prog=f"minidist {name}", args=argv, console_outputs=is_first_rank(), **more)
    except SystemExit as end:
        if end.code and not is_first_rank():
            let_first_rank_tell()
        raise


def _train(argv: list[str]) -> int:
    from minidist.tools.launch.start import start

    start(*train_options(argv))
    return 0


def train_options(argv: list[str], over: Sequence[str] = ()) -> tuple["Config", int | None]:
    """What `minidist train` is asked for: the configuration, and the ranks to start here (None when not given).

    over: options in the place of the defaults; those in `argv` win over them.
    """
    import tyro

    from minidist.config import Config

    @dataclass(frozen=True)
    class TrainOptions:
        """Train a decoder-only transformer, by default on the sources of Python's standard library.

        Ctrl-C or SIGTERM: the run saves after its step and ends with exit code 0; a second Ctrl-C ends it at once.
        """

        run: Annotated[Config, tyro.conf.arg(name="")]
        ranks: int | None = None
        """Ranks to start here; one per GPU, or two on the CPU, when not given. torchrun decides it itself."""
        config: Path | None = None
        """A TOML file with options; those on the command line win."""

    argv = [re.sub(r"^--(trace|memory)(?=$|=)", r"--\1.file", word) for word in argv]
    options = TrainOptions(_base_config(argv))
    if over:
        options = _parse(TrainOptions, "train", list(over), default=options)
    options = _parse(TrainOptions, "train", argv, default=options)
    return options.run, options.ranks


def _base_config(argv: list[str]):
    """Where options start from: the TOML file, over the run to resume, over the defaults."""
    from minidist.config import Config
    from minidist.config_file import from_toml
    from minidist.train.resume import resumed_config

    file, base = _value_of(argv, "--config"), Config()
    resume = _value_of(argv, "--checkpoint.resume")
    if resume is None and file is not None:
        resume = from_toml(Path(file)).checkpoint.resume
    if resume not in (None, "None"):
        base = resumed_config(Path(resume))
    return base if file is None else from_toml(Path(file), base)


def _value_of(argv: list[str], option: str) -> str | None:
    """The value given to an option that must be known before the others can be read."""
    for i, word in enumerate(argv):
        if word == option and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(option + "="):
            return word.split("=", 1)[1]
    return None


def _sample(argv: list[str]) -> int:
    from minidist.tools.console.sample_command import SampleOptions, sample

    print(sample(_parse(SampleOptions, "sample", argv)))
    return 0


def _parity(argv: list[str]) -> int:
    from minidist.tools.parity.command import ParityOptions
    from minidist.tools.parity.command import main as parity

    return parity(_parse(ParityOptions, "parity", argv))


def _estimate(argv: list[str]) -> int:
    import tyro

    from minidist.config import Config
    from minidist.tools.estimate import gpt, parameter_count
    from minidist.tools.estimate.command import main
    from minidist.tools.estimate.flops import parse_measured_step
    from minidist.tools.launch.start import chosen_ranks

    @dataclass(frozen=True)
    class EstimateOptions:
        """Estimate the cost of a training run on every rank: memory, bytes sent, FLOPs and the pipeline's bubble.

        Takes the options of `minidist train`; starts no rank and reads no data.
        """

        run: Annotated[Config, tyro.conf.arg(name="")]
        ranks: int | None = None
        """Ranks of the run; by default as many as `minidist train` would start."""
        config: Path | None = None
        """A TOML file with options; those on the command line win."""
        t_comm: float = 0.0
        """Time of a transfer between stages, for the bubble, in forwards of the costliest stage."""
        json: bool = False
        """Print JSON, with every rank in it, instead of a table."""
        parameters: float | None = None
        """Estimate the model states from a parameter count alone, for example 7.5e9."""
        block: Literal["llama", "gpt"] = "llama"
        """llama: the package's own model. gpt: one layer and the FLOPs of Megatron's GPT, as published."""
        step_time_s: float | None = None
        """Measured time of a step; together with --peak-tflops it gives MFU and HFU."""
        peak_tflops: float | None = None
        """Dense peak of one accelerator in TFLOP/s; an A100 has 312 in 16 bits."""

    options = _parse(EstimateOptions, "estimate", argv, default=EstimateOptions(_base_config(argv)))
    ranks, step = (
        chosen_ranks(options.run, options.ranks),
        parse_measured_step(options.step_time_s, options.peak_tflops),
    )
    if options.parameters is not None and (step or options.block == "gpt"):
        raise UserError(
            f"--parameters {options.parameters:g} estimates model states only, while --block gpt, --step-time-s and "
            "--peak-tflops need FLOPs: leave --parameters out, or them."
        )
    if options.parameters is not None:
        return parameter_count.main(options.run, ranks, options.parameters, options.json)
    if options.block == "gpt":
        return gpt.main(options.run, ranks, options.json, step)
    return main(options.run, ranks, options.t_comm, options.json, step)


def _simulate(argv: list[str]) -> int:
    from minidist.tools.simulate.command import SimulateOptions, main

    return main(_parse(SimulateOptions, "simulate", argv))


def _doctor(argv: list[str]) -> int:
    from minidist.tools.doctor import DoctorOptions, doctor

    return doctor(_parse(DoctorOptions, "doctor", argv))
