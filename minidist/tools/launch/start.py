"""Start a run: on new ranks of this machine, or on the ranks that torchrun has started.

Impossible requests raise UserError before any rank starts.
"""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.config import Config
from minidist.data.corpus import open_corpus
from minidist.errors import RunError, UserError, format_count
from minidist.fault.signals import stop_signals
from minidist.tools.config_warnings import validate_options
from minidist.tools.launch import RankFailure, RankServer
from minidist.tools.launch.gpus import count_gpus, format_too_few_gpus_message, has_own_gpu
from minidist.tools.launch.resume import check_resume, fetch_remote_checkpoint, share_run_folder_across_restarts
from minidist.tools.launch.run_folder_guard import RunLock, open_checked_run_folder
from minidist.tools.launch.torchrun import (
    is_restarted,
    is_under_torchrun,
    read_local_world_size,
    read_rendezvous_port,
    read_world_size,
    torchrun_world,
)
from minidist.tools.output_files import check_output_files
from minidist.tools.standard_streams import drop_failed_writes
from minidist.train import run_folder
from minidist.train.resume import inherit_options

if TYPE_CHECKING:
    from minidist.comm import World
    from minidist.tools.launch.job import Job, Replacement

CPU_RANKS = 2
_AGENT_SIGNAL_S = 2.0  # agents look for new nodes every 0.1 s


class _StoppedError(RunError):
    """A signal ended the run before the current step was done. exit_code: 128 plus the signal's number."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


def choose_default_ranks(config: Config) -> int:
    """Return the number of ranks to start if the user gives none: as many as the mesh needs.

    If `config.mesh.dp` is None, the mesh gets as many model replicas as fit on the GPUs of this machine (one rank per
    GPU), or on two ranks without a GPU, but at least one replica.
    """
    mesh = config.mesh
    replica = max(1, mesh.pp * mesh.cp * mesh.tp)
    if mesh.dp is not None:
        return max(1, mesh.dp) * replica
    gpus = (0 if config.device == "cpu" else count_gpus()) or CPU_RANKS
    return max(1, gpus // replica) * replica


def choose_ranks(config: Config, requested: int | None) -> int:
    """Return `requested`, or `choose_default_ranks` if it is None. Raises UserError for fewer than one rank."""
    if requested is not None and requested < 1:
        raise UserError(f"--ranks is {requested}; at least 1 rank is needed.")
    return choose_default_ranks(config) if requested is None else requested


def choose_device(config: Config, ranks: int) -> str:
    """Return the device that "auto" means for `ranks` ranks of this machine, else `config.device` as it is."""
    if config.device != "auto":
        return config.device
    gpus = count_gpus()
    return "cuda" if gpus and (ranks <= gpus or has_own_gpu(gpus)) else "cpu"


def check_offload(config: Config, device: str, ranks: int, instead: str = "") -> None:
    """Raise UserError if `config` offloads to the host and its ranks, on `device`, run there already.

    instead: what else the user may do, as the end of a sentence.
    """
    if config.zero.offload and device == "cpu":
        raise UserError(
            "zero.offload true has no effect: it moves master weights and optimizer states from a GPU to the host, and "
            f"the {format_count(ranks, 'rank runs', 'ranks run')} on the CPU (--device {config.device}). Leave "
            f"--zero.offload out{instead}."
        )


def resolve_device(config: Config, ranks: int) -> str:
    """Return the device for `ranks` ranks of this machine: "cpu", "cuda" (one GPU per rank) or "cuda:N" (shared).

    Replaces "auto" in `config.device`. Raises UserError if the requested device or backend is not available.
    """
    requested, backend = config.device, config.comm.backend
    gpus = 0 if requested == "cpu" else count_gpus()
    if requested.startswith("cuda:"):
        device = requested if int(requested.removeprefix("cuda:")) < gpus else None
    elif requested == "cuda":
        if 0 < gpus < ranks and not has_own_gpu(gpus):
            raise UserError(format_too_few_gpus_message(ranks, gpus))
        device = "cuda" if gpus else None
    else:
        device = choose_device(config, ranks)
    if device is None:
        raise UserError(f"--device {requested}: torch sees {format_count(gpus, 'GPU')} here. Give --device cpu.")
    if backend == "nccl" and (device == "cpu" or (device != "cuda" and ranks > 1)):
        counts = f"{format_count(ranks, 'rank')} on {device} and {format_count(gpus, 'GPU')}"
        raise UserError(
            f"--comm.backend nccl needs a GPU of its own for each rank; here are {counts}. Give --comm.backend gloo, "
            "or leave it out."
        )
    check_offload(config, device, ranks)
    if backend == "shm" and device != "cpu":
        raise UserError(
            f"--comm.backend shm is for ranks on CPU; here they are on {device}. Give --device cpu as well."
        )
    return device


def start(config: Config, ranks: int | None, program: Callable | None = None, extra_args: Sequence = ()) -> None:
    """Train on `ranks` new ranks of this machine, or as one rank if torchrun has started this process. Blocks.

    ranks: None for `choose_default_ranks`; must be None under torchrun.
    program: the function that every rank runs, `program(world, config, *extra_args)`; None for the trainer.
    The run does not end if its output cannot be written. Raises UserError before any rank starts if the run is
    impossible, RunError if the run fails.
    """
    config = inherit_options(config)
    if is_under_torchrun() and ranks is not None:
        raise UserError(f"--ranks {ranks} under torchrun, which starts the ranks itself: leave --ranks out.")
    with drop_failed_writes("stdout", "stderr"):
        if is_under_torchrun():
            _train_under_torchrun(config, program, extra_args)
        else:
            _train_on_new_ranks(config, choose_ranks(config, ranks), program, extra_args)


def _train_on_new_ranks(config: Config, ranks: int, program: Callable | None = None, extra_args: Sequence = ()) -> None:
    """Train on new ranks of this machine. program, extra_args: as in `start`.

    Raises UserError before any rank starts if the run is impossible, RunError if it fails.
    """
    validate_options(config, ranks)
    device = resolve_device(config, ranks)
    check_output_files(config)
    corpus = open_corpus(config.data.source, config.data.path, config.data.seq_len)
    fetch_remote_checkpoint(config)
    run = open_checked_run_folder(config)
    folder = run.path
    if device == "cpu" and config.device != "cpu" and (gpus := count_gpus()):
        print(
            f"{format_count(ranks, 'rank')} and {format_count(gpus, 'GPU')}: running on the CPU",
            file=sys.stderr,
            flush=True,
        )
    # The simple engine uses torch's optimizers as they are, which import torch's compiler.
    needs_compiler = config.compile or config.engine == "simple"
    preload = (*("torch._dynamo",) * needs_compiler, "minidist.tools.launch.run")
    try:
        RunLock(folder).release()  # refuses a folder that another run uses, or that cannot be written
        check_resume(run, config, corpus)
        with (
            RankServer(method=None if device == "cpu" else "spawn", preload=preload) as server,
            _restore_cursor_after_error(),
        ):
            job = server.start(
                program or _train_and_report,
                ranks,
                (dataclasses.replace(config, folder=folder), *extra_args),
                backend=config.comm.backend,
                device=device,
                capture=False,
                timeout_s=config.comm.timeout_s,
                hang_limit_s=config.comm.hang_limit_s,
                replacement=_make_replacement_policy(config),
            )
            _wait(job, folder)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty


def _train_and_report(world: "World", config: Config) -> dict[str, Any]:
    """Run the trainer. Only the ranks import it, and with it torch."""
    from minidist.tools.launch.run import train_and_report

    return train_and_report(world, config)


def _make_replacement_policy(config: Config) -> "Replacement | None":
    """Return how dead ranks are replaced under live recovery; None if they are not."""
    from minidist.tools.launch.job import Replacement

    mesh, fault = config.mesh, config.fault
    return Replacement(fault.max_restarts, mesh.pp * mesh.cp * mesh.tp) if fault.live_recovery else None


def _wait(job: "Job", folder: Path) -> None:
    """Wait for the end of the run. SIGINT, SIGTERM and SIGHUP make it save and stop; a second SIGINT kills it."""
    received: list[int] = []

    def forward(number: int, _) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)
        job.stop(number)
        if not sys.stdout.isatty():  # the live view shows it
            name = signal.Signals(number).name
            again = "; a second SIGINT ends the run at once" if number == signal.SIGINT else ""
            print(f"{name}: saving after this step{again}", file=sys.stderr, flush=True)

    previous_handlers = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        job.wait()
    except KeyboardInterrupt:
        raise _StoppedError(signal.SIGINT, f"ended at once. {run_folder.describe_last_checkpoint(folder)}") from None
    except RankFailure as failure:
        if received and failure.kind == "hang":
            last = run_folder.describe_last_checkpoint(folder)
            name = signal.Signals(received[0]).name
            raise _StoppedError(received[0], f"ended by {name}. {failure}\n{last}") from None
        if received and _is_caused_by_signal(failure, received):
            name = signal.Signals(received[0]).name
            raise _StoppedError(received[0], f"ended by {name} before the first step; nothing was written.") from None
        last = run_folder.describe_last_checkpoint(folder)
        raise RunError(str(failure) if last in str(failure) else f"{failure}\n{last}") from failure
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _is_caused_by_signal(failure: RankFailure, received: list[int]) -> bool:
    """Return whether the signal itself ended the ranks, as it does before training begins."""
    names = [signal.Signals(number).name for number in received]
    return any(f"killed by {name}" in str(failure) for name in names) or "raised KeyboardInterrupt" in str(failure)


@contextlib.contextmanager
def _restore_cursor_after_error() -> Iterator[None]:
    """Show the terminal's cursor again after an error: the live view of a killed rank leaves it hidden."""
    try:
        yield
    except BaseException:
        if sys.stdout.isatty():
            print("\x1b[?25h", flush=True)
        raise


def _train_under_torchrun(config: Config, program: Callable | None = None, extra_args: Sequence = ()) -> None:
    """Train as one of the ranks that torchrun has started. program, extra_args: as in `start`.

    A signal to any rank stops all ranks. The ranks that have not received a signal then wait for the signal of their
    own torchrun agent, which notices a new node a little later than other agents do. If none arrives they end with an
    exit code other than 0: the run is not complete, and torchrun starts it again if `--max-restarts` allows.
    """
    read_rendezvous_port()
    if config.fault.live_recovery:
        raise UserError(
            "--fault.live-recovery under torchrun, which ends all ranks when one dies: leave it out and give torchrun "
            "--max-restarts, or start the run with minidist train --ranks."
        )
    validate_options(config, read_world_size())
    resolve_device(config, read_local_world_size())
    if is_restarted():  # an injected fault would meet every attempt
        config = dataclasses.replace(config, fault=dataclasses.replace(config.fault, inject=None))
    comm = config.comm
    with torchrun_world(config.device, comm.backend, comm.timeout_s, comm.hang_limit_s) as world:
        config = share_run_folder_across_restarts(world, config)
        summary = (program or _train_and_report)(world, config, *extra_args)
    if summary and summary.get("stopped") and not summary.get("stop_signal"):
        # torchrun would take exit code 0 for the end of the run, and not start it again on the nodes that are left.
        time.sleep(_AGENT_SIGNAL_S)
        raise SystemExit(128 + signal.SIGTERM)
