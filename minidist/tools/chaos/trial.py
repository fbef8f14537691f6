"""One trial: a run with a fault, the check of how it ended, the resumed run, and the check of what it lost."""

import contextlib
import dataclasses
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minidist.checkpoint import folders
from minidist.comm import Meter, World
from minidist.config import Config
from minidist.data.synthetic import generate_text
from minidist.errors import RunError, UserError
from minidist.tools.chaos.faults import parse_fault
from minidist.tools.chaos.injector import FaultInjector
from minidist.tools.chaos.plan import STEPS, Trial, TrialLayout, make_config
from minidist.tools.console.metrics_file import MetricsFile, read_metrics
from minidist.tools.console.reporter import make_start_row, open_metrics_file
from minidist.tools.launch import RankFailure, RankServer
from minidist.tools.launch.job import Replacement
from minidist.tools.recovery.live_recovery import train_with_recovery
from minidist.train.observer import Observer
from minidist.train.run_folder import CHECKPOINTS
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer, train

TOLERANCE = 1e-6  # nats: between the losses of two layouts in float32
_TEXT_BYTES = 8000
_DEADLINE_S = 120.0
_STOPPED_RANK_S = 0.5  # for the launcher to end a run with a stopped rank, before this command does
_RUN_FILES = {"checkpoints", "config.toml", "metrics.jsonl"}


class _LossAndNoteRecorder(Observer):
    """Observer that, on rank 0, writes each step's loss to metrics.jsonl and prints the run's notes."""

    def __init__(self):
        self._file: MetricsFile | None = None

    def on_start(self, trainer: Trainer) -> None:
        """On rank 0, open metrics.jsonl in the run folder."""
        self.resumed_from = trainer.resumed_from
        if trainer.world.rank == 0:
            self._file = open_metrics_file(trainer)
            self._file.write_row(make_start_row(trainer))

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """On rank 0, write the loss of the step."""
        if self._file is not None:
            self._file.write_row({"step": trainer.progress.step, "loss": result.loss})

    def on_note(self, line: str) -> None:
        """On rank 0, print the note."""
        if self._file is not None:
            print(line, flush=True)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Add the checkpoint from which the run was resumed to the summary."""
        summary["resumed_from"] = self.resumed_from


def _train_rank(world: World, config: Config) -> dict[str, Any]:
    """Collective: train with the fault of the configuration; return the summary, with "resumed_from"."""
    torch.set_num_threads(1)  # a model this small is slower on every further thread
    if config.fault.live_recovery:
        return train_with_recovery(world, config, _make_observers_and_meter)
    return train(world, config, *_make_observers_and_meter(config))


def _make_observers_and_meter(config: Config) -> tuple[list[Observer], Meter | None]:
    """Return the observers of a trial's run, and the meter that injects its fault (None without one)."""
    if config.fault.inject is None:
        return [_LossAndNoteRecorder()], None
    injector = FaultInjector(parse_fault(config.fault.inject))
    return [injector, _LossAndNoteRecorder()], injector.meter


@dataclass
class Outcome:
    """The result of a trial, filled in while it runs.

    ended: how the run with the injected fault ended: "went on" or the first line of its error. problems: one line for
    each check that failed, [] if the trial passed. resumed_step: the number of completed steps in the checkpoint from
    which the run was resumed; 0 if it had none and began again. difference: the largest difference, in nats, between a
    loss after that step and the loss of the uninterrupted run. seconds: the duration of the trial.
    """

    ended: str = ""
    problems: list[str] = field(default_factory=list)
    resumed_step: int = 0
    difference: float = 0.0
    seconds: float = 0.0


class TrialRunner:
    """Runs chaos trials on the ranks of one rank server, in a temporary folder.

    folder: contains the run folders; the run folders of a trial that has passed are deleted.
    """

    def __init__(self, server: RankServer, folder: Path):
        self._server, self._folder = server, folder
        self._text = folder / "text.txt"
        self._text.write_bytes(generate_text(_TEXT_BYTES).tobytes())
        self._references: dict[TrialLayout, dict[int, float]] = {}

    def reference_losses(self, layout: TrialLayout) -> dict[int, float]:
        """Return the losses of an uninterrupted run on this layout, by step, in nats per token.

        The held-out loss is included, as step STEPS + 1. The first call for a layout runs it; later calls return the
        same losses.
        """
        if layout not in self._references:
            folder = self._folder / "reference"
            config = make_config(layout, self._text, folder)
            summary = self._server.run(_train_rank, layout.num_ranks, (config,), deadline_s=_DEADLINE_S).values[0]
            self._references[layout] = read_losses(folder) | {STEPS + 1: summary["held_out_loss"]}
            shutil.rmtree(folder)
        return self._references[layout]

    def run_trial(self, trial: Trial) -> Outcome:
        """Run training with the fault of a trial, then resume it; check both runs and return what was found.

        The losses are compared with uninterrupted runs. A run that fails, or ends otherwise than the fault requires, is
        a line of `Outcome.problems`, not an exception.
        """
        start_s, outcome = time.monotonic(), Outcome()
        folder = self._folder / f"trial-{trial.number}"
        try:
            self._run_and_check(trial, folder, outcome)
        except (RunError, UserError) as error:
            outcome.problems.append(f"the resumed run failed: {error}")
        outcome.seconds = time.monotonic() - start_s
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome

    def _run_and_check(self, trial: Trial, folder: Path, outcome: Outcome) -> None:
        """Run and resume a trial in `folder`; fill in `outcome`."""
        first, second = self.reference_losses(trial.layout), self.reference_losses(trial.resumed_layout)
        config = make_config(trial.layout, self._text, folder, trial)
        pids = self._run_with_fault(trial, config, outcome)
        run = folder
        checkpoints = folders.complete_checkpoints(folder / CHECKPOINTS)
        if trial.fault.kind == "flip":  # later checkpoints hold what the flipped bit has done
            checkpoints = {step: path for step, path in checkpoints.items() if step < trial.fault.step}
            run = folder.with_name(f"{folder.name}-resumed")
        newest = max(checkpoints, default=0)
        resumed = make_config(trial.resumed_layout, self._text, run)
        if run != folder and newest:
            resumed = dataclasses.replace(
                resumed, checkpoint=dataclasses.replace(resumed.checkpoint, resume=checkpoints[newest], inherit=False)
            )
        job = self._server.start(_train_rank, trial.resumed_layout.num_ranks, (resumed,), deadline_s=_DEADLINE_S)
        summary = job.wait().values[0]
        outcome.resumed_step = newest
        if summary["resumed_from"] != checkpoints.get(newest):
            outcome.problems.append(f"resumed from {summary['resumed_from']}, not from {checkpoints.get(newest)}")
        losses = read_losses(run) | {STEPS + 1: summary["held_out_loss"]}
        outcome.problems += self._check_losses(trial, newest, losses, first, second, outcome)
        outcome.problems += find_leftover_resources(run, [*pids, *job.pids])
        if run != folder:
            shutil.rmtree(run)

    def _run_with_fault(self, trial: Trial, config: Config, outcome: Outcome) -> list[int]:
        """Run until the fault has ended the run, or to its end; check which; returns the process ids of the ranks."""
        layout, replacement = trial.layout, None
        if trial.live_recovery:
            replacement = Replacement(config.fault.max_restarts, layout.tp * layout.pp)
        job = self._server.start(
            _train_rank, layout.num_ranks, (config,), deadline_s=_DEADLINE_S, replacement=replacement
        )
        fault, stop_time, failure, pids, all_pids = trial.fault, None, None, job.pids, set(job.pids)
        while not job.poll(0.02):
            pids = job.pids
            all_pids |= set(pids)
            if fault.kind == "stop" and is_stopped(pids[fault.rank]):
                stop_time = stop_time or time.monotonic()
                if time.monotonic() - stop_time > _STOPPED_RANK_S:
                    job.kill()
        try:
            output = "".join(job.wait().output)
        except (RunError, UserError) as error:
            failure = error
            output = "".join(getattr(error, "output", []))
        outcome.ended = "went on" if failure is None else str(failure).splitlines()[0]
        if f"injecting: {fault}" not in output and fault.kind != "kill" and not isinstance(failure, RunError):
            outcome.problems.append("the fault was not injected")
        if problem := _check_end(trial, failure, stop_time is not None, output):
            outcome.problems.append(f"{problem}: {failure or output or 'the run went on'}")
        return sorted(all_pids)

    def _check_losses(
        self, trial: Trial, resumed: int, losses: dict[int, float], first: dict, second: dict, outcome: Outcome
    ) -> list[str]:
        """Compare the losses of a run with `first` up to step `resumed`, then with `second`; return the problems.

        losses, first, second: by step. outcome: gets the largest difference.
        """
        # Fewer ranks sum in another order, so after a live recovery the losses of the run itself differ by roundings.
        same, problems = trial.layout == trial.resumed_layout and not trial.live_recovery, []
        last_exact = 0 if trial.live_recovery else resumed
        separate = trial.fault.kind == "flip"  # the resumed run has a metrics file of its own, with its own steps only
        expected = (set(range(resumed + 1, STEPS + 1)) if separate else set(range(1, STEPS + 1))) | {STEPS + 1}
        if not separate or resumed == 0:
            expected |= set(range(1, STEPS + 1))
        if missing := sorted(expected - set(losses)):
            problems.append(f"metrics.jsonl has no loss of steps {missing}")
        for step, loss in losses.items():
            reference = (first if step <= resumed else second).get(step, math.nan)
            difference = abs(loss - reference)
            if step > last_exact:
                outcome.difference = max(outcome.difference, difference)
            if not difference <= (TOLERANCE if step > last_exact and not same else 0.0):
                problems.append(f"step {step}: the loss is {loss!r}, and {reference!r} in the uninterrupted run")
                break
        return problems


def _check_end(trial: Trial, failure: Exception | None, was_stopped: bool, output: str) -> str | None:
    """Return what is wrong with how a run with a fault ended, as text; None if it ended as it should."""
    fault, text = trial.fault, str(failure)
    if trial.live_recovery:
        went_on = failure is None and f"rank {fault.rank} (process " in output and "s after the failure" in output
        return None if went_on else f"the run did not go on without rank {fault.rank}"
    if fault.kind == "kill":
        named = isinstance(failure, RankFailure) and failure.ranks == (fault.rank,) and "SIGKILL" in text
        return None if named else f"the run did not end with the death of rank {fault.rank}"
    if fault.kind == "stop":
        return None if was_stopped and failure is not None else f"the run did not end when rank {fault.rank} stopped"
    if fault.kind == "nan":
        return None if failure is not None and "not finite" in text else "the run did not end because of a NaN"
    if fault.kind == "full":
        return None if failure is None and "No space left" in output else "the run did not go on with a full disk"
    if fault.kind == "flip":
        return None if failure is None or "finite" in text or "differ" in text else "the run failed in another way"
    return None if failure is None else "the run did not go on"


def read_losses(folder: Path) -> dict[int, float]:
    """Return the training losses in a run folder's metrics.jsonl, by step. Raises RunError if a step occurs twice."""
    losses: dict[int, float] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        if "loss" in row:
            if row["step"] in losses:
                raise RunError(f"metrics.jsonl has step {row['step']} twice")
            losses[row["step"]] = row["loss"]
    return losses


def find_leftover_resources(folder: Path, pids: list[int]) -> list[str]:
    """Return a line of text for each thing that a run and its resumption have left behind; [] if all is clean.

    It looks for live processes, shared memory, partial checkpoints, and unknown files in the run folder. pids: of all
    ranks of both runs.
    """
    names = set(os.listdir(folder)) - _RUN_FILES
    checkpoints = folder / CHECKPOINTS
    complete = {path.name for path in folders.complete_checkpoints(checkpoints).values()}
    names |= {f"{CHECKPOINTS}/{name}" for name in set(os.listdir(checkpoints)) - complete}
    found = [f"left in the run folder: {', '.join(sorted(names))}"] if names else []
    found += [f"process {pid} is still there" for pid in pids if pid and Path(f"/proc/{pid}").exists()]
    with contextlib.suppress(OSError):
        segments = [name for name in os.listdir("/dev/shm") if any(str(pid) in name.split("_") for pid in pids)]
        found += [f"shared-memory segment {name}" for name in segments]
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by a signal (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
