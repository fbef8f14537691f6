"""Start a run: on new ranks of this machine, or on the ranks that torchrun has started.

Requests that cannot work are refused before any rank starts.
"""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.config import Config
from minidist.data.corpus import open_corpus
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankFailure, RankServer
from minidist.tools.launch.gpus import has_own_gpu, too_few_gpus
from minidist.tools.launch.torchrun import (
    meeting_port,
    torchrun_local_size,
    torchrun_size,
    torchrun_world,
    under_torchrun,
)
from minidist.tools.output_files import check_output_files
from minidist.train import run_folder
from minidist.train.resume import check_before
from minidist.validation import validate

if TYPE_CHECKING:
    from minidist.tools.launch.job import Job

CPU_RANKS = 2


class StoppedError(RunError):
    """Raised when a signal ends the run within a step; `exit_code` is that of the signal."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


def default_ranks(config: Config) -> int:
    """Return the ranks that the mesh needs; else one per GPU; else two, or one model replica if that is more."""
    mesh = config.mesh
    replica = max(1, mesh.pp * mesh.cp * mesh.tp)
    if mesh.dp is not None:
        return max(1, mesh.dp) * replica
    found = (0 if config.device == "cpu" else gpus()) or CPU_RANKS
    return max(1, found // replica) * replica


def chosen_ranks(config: Config, asked: int | None) -> int:
    """Return the number of ranks; `default_ranks` if `asked` is None. Raises UserError for fewer than one."""
    if asked is not None and asked < 1:
        raise UserError(f"--ranks is {asked}; at least 1 rank is needed.")
    return default_ranks(config) if asked is None else asked


def gpus() -> int:
    """Count the GPUs that torch can use on this machine."""
    drivers = ("nvidia[0-9]*", "kfd", "dxg")
    if sys.platform == "linux" and not any(found for name in drivers for found in Path("/dev").glob(name)):
        return 0  # without importing torch, which takes seconds
    import torch

    return torch.cuda.device_count()


def choose_place(config: Config, ranks: int) -> str:
    """Choose the device of `ranks` ranks of one machine: "cpu", "cuda" (a GPU each) or "cuda:N" (all on one).

    Raises UserError if the requested device or backend is not available.
    """
    asked, backend = config.device, config.comm.backend
    found = 0 if asked == "cpu" else gpus()
    if asked.startswith("cuda:"):
        place = asked if int(asked.removeprefix("cuda:")) < found else None
    elif asked == "cuda":
        if 0 < found < ranks and not has_own_gpu(found):
            raise UserError(too_few_gpus(ranks, found))
        place = "cuda" if found else None
    else:
        place = "cuda" if found and (ranks <= found or has_own_gpu(found)) else "cpu"
    if place is None:
        raise UserError(f"--device {asked}: torch sees {found} GPUs here. Give --device cpu.")
    if backend == "nccl" and (place == "cpu" or (place != "cuda" and ranks > 1)):
        raise UserError(
            f"--comm.backend nccl needs a GPU of its own for each rank; here are {ranks} ranks on {place} and "
            f"{found} GPUs. Give --comm.backend gloo, or leave it out."
        )
    if config.zero.offload and place == "cpu":
        raise UserError(
            "zero.offload true has no effect: it moves master weights and optimizer states from a GPU to the host, and "
            f"the {ranks} ranks run on the CPU (--device {asked}). Leave --zero.offload out."
        )
    if backend == "shm" and place != "cpu":
        raise UserError(f"--comm.backend shm is for ranks on CPU; here they are on {place}. Give --device cpu as well.")
    return place


def start(config: Config, ranks: int | None, program: Callable | None = None, more: Sequence = ()) -> None:
    """Train on `ranks` new ranks of this machine (None: `default_ranks`), or as a rank that torchrun has started.

    program: what every rank runs, `program(world, config, *more)`; the trainer when None.
    Raises UserError before any rank starts if the run is impossible, RunError if it fails.
    """
    if under_torchrun():
        if ranks is not None:
            raise UserError(f"--ranks {ranks} under torchrun, which starts the ranks itself: leave --ranks out.")
        train_under_torchrun(config, program, more)
        return
    train_here(config, chosen_ranks(config, ranks), program, more)


def train_here(config: Config, ranks: int, program: Callable | None = None, more: Sequence = ()) -> None:
    """Train on new ranks of this machine. Raises UserError before any of them starts, RunError if the run fails."""
    validate(config, ranks)
    place = choose_place(config, ranks)
    check_output_files(config)
    check_before(config, open_corpus(config.data.source, config.data.path, config.data.seq_len))
    folder = run_folder.claim(config)
    if place == "cpu" and config.device != "cpu" and (found := gpus()):
        print(f"{ranks} ranks and {found} GPU{'s' * (found > 1)}: running on the CPU", file=sys.stderr, flush=True)
    preload = ("torch._dynamo", "minidist.tools.launch.run")
    try:
        with RankServer(method=None if place == "cpu" else "spawn", preload=preload) as server, _whole_terminal():
            from minidist.tools.launch.run import (
                train_and_report,  # while the server imports torch, this process does too
            )

            job = server.start(
                program or train_and_report,
                ranks,
                (dataclasses.replace(config, folder=folder), *more),
                backend=config.comm.backend,
                device=place,
                capture=False,
                timeout_s=config.comm.timeout_s,
            )
            _wait(job, folder)
    finally:
        run_folder.abandon(folder)


def _wait(job: "Job", folder: Path) -> None:
    """Wait for the end of the run. SIGINT and SIGTERM make it save and stop; a second SIGINT kills it."""
    asked: list[int] = []

    def ask(number: int, _) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)
        job.send_signal(number)
        if not sys.stdout.isatty():  # the live view shows it
            name = signal.Signals(number).name
            again = "; a second SIGINT ends the run at once" if number == signal.SIGINT else ""
            print(f"{name}: saving after this step{again}", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        job.wait()
    except KeyboardInterrupt:
        raise StoppedError(signal.SIGINT, f"ended at once. {run_folder.last_checkpoint(folder)}") from None
    except RankFailure as failure:
        if asked and _only_stopped(failure, asked):
            name = signal.Signals(asked[0]).name
            raise StoppedError(asked[0], f"ended by {name} before the first step; nothing was written.") from None
        last = run_folder.last_checkpoint(folder)
        raise RunError(str(failure) if last in str(failure) else f"{failure}\n{last}") from failure
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _only_stopped(failure: RankFailure, asked: list[int]) -> bool:
    """Whether the signal itself killed the ranks, as it does before training begins."""
    names = [signal.Signals(number).name for number in asked]
    return any(f"killed by {name}" in str(failure) for name in names) or "raised KeyboardInterrupt" in str(failure)


@contextlib.contextmanager
def _whole_terminal() -> Iterator[None]:
    """Restore the terminal's cursor after an error: a killed rank cannot undo what its live view changed."""
    try:
        yield
    except BaseException:
        if sys.stdout.isatty():
            print("\x1b[?25h", flush=True)
        raise


def train_under_torchrun(config: Config, program: Callable | None = None, more: Sequence = ()) -> None:
    """Train as one of the ranks that torchrun has started."""
    meeting_port()
    validate(config, torchrun_size())
    choose_place(config, torchrun_local_size())
    from minidist.tools.launch.run import train_and_report

    with torchrun_world(config.device, config.comm.backend, config.comm.timeout_s) as world:
        (program or train_and_report)(world, config, *more)
