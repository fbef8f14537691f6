"""The command line: `minidist train`, `estimate`, `doctor`, ... Parses the options and runs the command.

A wrong option or an impossible request ends in one message and exit code 2, before any rank starts; a run that failed
ends in one message and exit code 1. Neither shows a traceback.
"""

import contextlib
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from minidist import __version__
from minidist.config import Config
from minidist.errors import RunError, UserError, suggest
from minidist.tools.options import FLAT, given_options, help_width, parse_options
from minidist.tools.standard_streams import drop_failed_writes, open_closed_streams, watch_standard_output

COMMANDS = {
    "train": "train a model on the ranks of this machine, or under torchrun",
    "sample": "generate text from a checkpoint",
    "parity": "compare every layout of N ranks with one process",
    "consistency": "compare synchronous training with local SGD, DiLoCo, asynchronous workers and others",
    "chaos": "inject faults into small runs, resume them, and check that nothing was lost",
    "estimate": "estimate memory, bytes sent, FLOPs and pipeline bubble of a layout",
    "simulate": "draw the timeline of a pipeline schedule, with its bubble and peak memory",
    "doctor": "check this machine, and suggest fixes",
}
# The exit code of a program that SIGPIPE ended, as a shell reports it.
_PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `minidist` command with the arguments `argv`; return the exit code. argv: None for `sys.argv[1:]`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    """Run the command that `argv` names, with its options; return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(format_usage("minidist", COMMANDS))
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"minidist {__version__}")
        return 0
    runners: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sample": _sample,
        "parity": _parity,
        "consistency": _consistency,
        "chaos": _chaos,
        "estimate": _estimate,
        "simulate": _simulate,
        "doctor": _doctor,
    }
    from minidist.tools.launch.torchrun import defer_sigterm

    defer_sigterm()
    if argv[0] not in runners:
        raise UserError(f"there is no command {argv[0]!r}; {suggest(argv[0], runners)} minidist --help describes them.")
    return runners[argv[0]](argv[1:])


def run_to_exit_code(run: Callable[[], int], name: str = "minidist") -> int:
    """Call `run` and return its exit code; if it raises UserError or RunError, print the error and return its code.

    name: the program's name, which precedes the error message on stderr. SIGINT, SIGTERM and SIGHUP end `run` as
    exceptions, so that it deletes its temporary files; SIGINT returns 130. If the reader of standard output has closed
    it, as `head` does, returns 141 without a message; if it cannot be written for another reason, 1 with one.
    """
    open_closed_streams()
    with drop_failed_writes("stderr"), watch_standard_output() as is_output_error:
        try:
            with _exceptions_from_signals():
                code = run()
            sys.stdout.flush()
            return code
        except (UserError, RunError) as error:
            _print_error(error, name)
            return error.exit_code
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            if not is_output_error(error):
                raise
            if isinstance(error, BrokenPipeError):
                return _PIPE_CLOSED
            reason = error.strerror or error
            print(f"{name}: standard output cannot be written: {reason}.", file=sys.stderr, flush=True)
            return 1


@contextlib.contextmanager
def _exceptions_from_signals() -> Iterator[None]:
    """Return a context manager in which SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP SystemExit.

    A shell that starts a command in the background lets it ignore SIGINT. Other handlers than the default stay.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # or a second one would interrupt the cleaning up
        raise SystemExit(128 + number)

    installed: list[tuple[int, Any, Any]] = []
    if threading.current_thread() is threading.main_thread():
        for number, default, handler in (
            (signal.SIGINT, signal.SIG_IGN, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL, end),
            (signal.SIGHUP, signal.SIG_DFL, end),  # which `nohup` ignores, and so does this
        ):
            if signal.getsignal(number) == default:
                signal.signal(number, handler)
                installed.append((number, default, handler))
    try:
        yield
    finally:
        for number, default, handler in installed:
            if signal.getsignal(number) == handler:  # the command may have installed its own, as `defer_sigterm` does
                signal.signal(number, default)


def format_usage(program: str, commands: dict[str, str]) -> str:
    """Return the help text of a program that has commands: a usage line, and each command with its description.

    program: the program's name. commands: by name, the description of each command.
    """
    width = max(map(len, commands)) + 2
    lines = [f"usage: {program} COMMAND [OPTIONS]", ""]
    for name, description in commands.items():
        lines += textwrap.wrap(
            description, help_width(), initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2)
        )
    return "\n".join([*lines, "", f"{program} COMMAND --help lists the options of a command."])


def _print_error(error: UserError | RunError, name: str = "minidist") -> None:
    """Print an error on stderr. Under torchrun, rank 0 prints it; another rank does only if rank 0 cannot.

    When torchrun restarts the ranks, rank 0 does not print the same UserError again. name: the program's name, which
    precedes the message.
    """
    from minidist.tools.launch.torchrun import (
        is_first_rank,
        read_rank_text,
        report_to_torchrun,
        wait_for_end_of_rank_0,
        was_reported_before,
    )

    if is_first_rank():
        if not (isinstance(error, UserError) and was_reported_before(f"{name}: {error}")):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        report_to_torchrun(f"{name}: {error}")
        return
    first_has_ended = wait_for_end_of_rank_0()
    # Collectives fail on the peers of a dead rank, and rank 0 may be the dead one.
    if not first_has_ended or (isinstance(error, RunError) and error.of_some_ranks):
        print(f"{name}: rank {read_rank_text()}: {error}", file=sys.stderr, flush=True)
        report_to_torchrun(f"{name}: rank {read_rank_text()}: {error}")
    else:
        report_to_torchrun("the same error as rank 0")


def _parse(kind: type, name: str, argv: list[str], default: Any = None) -> Any:
    """Parse `argv`, the options of `minidist NAME`, into an instance of the dataclass `kind`.

    name: of the command. default: an instance with the default values; None: those of `kind`.
    """
    return parse_options(kind, f"minidist {name}", argv, default)


@dataclass(frozen=True)
class TrainOptions:
    """Train a decoder-only transformer, by default on the source files of Python's standard library.

    Ctrl-C, SIGTERM or SIGHUP (of a terminal that closes): the run saves a checkpoint after the current step and exits
    with code 0; a second Ctrl-C ends it at once. Under nohup a SIGHUP changes nothing.
    """

    run: Annotated[Config, FLAT] = field(default_factory=Config)
    ranks: int | None = None
    """Ranks to start on this machine; one per GPU, or two on the CPU, when not given. torchrun starts ranks itself."""
    config: Path | None = None
    """A TOML file with options, `ranks` among them; options on the command line take precedence."""


def _train(argv: list[str]) -> int:
    from minidist.tools.launch.start import start

    start(*parse_train_options(argv))
    return 0


def parse_train_options(argv: list[str], default_options: Sequence[str] = ()) -> tuple[Config, int | None]:
    """Parse the options of `minidist train`; return the configuration and the number of ranks (None if not given).

    default_options: options, as words of a command line, that replace the defaults; options in `argv` take precedence.
    """
    argv = [re.sub(r"^--(trace|memory)(?=$|=)", r"--\1.file", word) for word in argv]
    base, ranks = _base_config(argv)
    options = TrainOptions(base, ranks)
    if default_options:
        options = _parse(TrainOptions, "train", list(default_options), options)
    options = _parse(TrainOptions, "train", argv, options)
    return _add_given_options(options.run, TrainOptions, argv), options.ranks


def _add_given_options(run: Config, kind: type, argv: list[str]) -> Config:
    """Return `run` with the options that occur in `argv` added to its set of options given by the user.

    kind: the dataclass of the command's options.
    """
    return replace(run, given=run.given | given_options(kind, argv))


def _base_config(argv: list[str]) -> tuple[Config, int | None]:
    """Return the configuration before the options in `argv` are applied, and `ranks` of the TOML file.

    The TOML file overrides the run to resume, which overrides the defaults. `ranks` is None without a file that sets
    it.
    """
    from minidist.tools.config_file import read_config_file, read_rank_count
    from minidist.tools.launch.torchrun import is_under_torchrun
    from minidist.train.resume import read_resumed_config

    file, base = _find_option_value(argv, "--config"), Config()
    how = base.checkpoint if file is None else read_config_file(Path(file)).checkpoint
    resume = _find_option_value(argv, "--checkpoint.resume") or how.resume
    inherits = how.inherit and "--checkpoint.no-inherit" not in argv
    if inherits and resume not in (None, "None", "none", "auto", Path("auto")):
        base = read_resumed_config(Path(resume))
    if file is None:
        return base, None
    return read_config_file(Path(file), base), None if is_under_torchrun() else read_rank_count(Path(file))


def _find_option_value(argv: list[str], option: str) -> str | None:
    """Return the value of `option` in `argv`, before the options are parsed; None if it is not given."""
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


def _consistency(argv: list[str]) -> int:
    from minidist.tools.config_file import read_config_file
    from minidist.tools.consistency.command import main as consistency
    from minidist.tools.consistency.comparison_options import ConsistencyOptions

    options, file = ConsistencyOptions(), _find_option_value(argv, "--config")
    if file is not None:
        options = replace(options, run=read_config_file(Path(file), options.run))
    options = _parse(ConsistencyOptions, "consistency", argv, options)
    return consistency(replace(options, run=_add_given_options(options.run, ConsistencyOptions, argv)))


def _chaos(argv: list[str]) -> int:
    from minidist.tools.chaos.command import ChaosOptions
    from minidist.tools.chaos.command import main as chaos

    return chaos(_parse(ChaosOptions, "chaos", argv))


@dataclass(frozen=True)
class _EstimateOptions:
    """Estimate the cost of a training run on every rank: memory, bytes sent, FLOPs and the pipeline's bubble.

    Takes the options of `minidist train`; starts no rank and reads no data.
    """

    run: Annotated[Config, FLAT] = field(default_factory=Config)
    ranks: int | None = None
    """Ranks of the run; by default as many as `minidist train` would start."""
    config: Path | None = None
    """A TOML file with options; those on the command line win."""
    t_comm: float = 0.0
    """Time of a transfer between stages, as a multiple of the costliest model chunk's forward; for the bubble."""
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
    mtbf_s: float | None = None
    """Mean time between failures of the whole run, in seconds; with --save-s it gives the best time between saves."""
    save_s: float | None = None
    """Time for which saving a checkpoint stalls training, in seconds."""
    restart_s: float | None = None
    """Time from a failure to the first new step, in seconds; 0 when not given."""


def _estimate(argv: list[str]) -> int:
    from minidist.tools.estimate import gpt, parameter_count
    from minidist.tools.estimate.command import main
    from minidist.tools.estimate.failures import parse_failure_model
    from minidist.tools.estimate.flops import parse_measured_step
    from minidist.tools.launch.start import check_offload, choose_device, choose_ranks

    options = _parse(_EstimateOptions, "estimate", argv, _EstimateOptions(*_base_config(argv)))
    options = replace(options, run=_add_given_options(options.run, _EstimateOptions, argv))
    ranks = choose_ranks(options.run, options.ranks)
    instead = ", or give --device cuda to estimate a run on GPUs"
    check_offload(options.run, choose_device(options.run, ranks), ranks, instead)
    step = parse_measured_step(options.step_time_s, options.peak_tflops)
    failures = parse_failure_model(options.mtbf_s, options.save_s, options.restart_s)
    if options.parameters is not None and (step or options.block == "gpt"):
        raise UserError(
            f"--parameters {options.parameters:g} estimates model states only, while --block gpt, --step-time-s and "
            "--peak-tflops need FLOPs: leave --parameters out, or them."
        )
    if options.parameters is not None:
        return parameter_count.main(options.run, ranks, options.parameters, options.json, failures)
    if options.block == "gpt":
        return gpt.main(options.run, ranks, options.json, step, failures)
    return main(options.run, ranks, options.t_comm, options.json, step, failures)


def _simulate(argv: list[str]) -> int:
    from minidist.tools.simulate.command import SimulateOptions, main

    return main(_parse(SimulateOptions, "simulate", argv))


def _doctor(argv: list[str]) -> int:
    from minidist.tools.doctor import DoctorOptions, doctor

    return doctor(_parse(DoctorOptions, "doctor", argv))
