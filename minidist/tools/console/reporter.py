"""The observer that reports a run: metrics.jsonl, and lines or a live view while it trains; at the end the loss plot,
a sample of the model's text and the n-gram baselines."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minidist.fault.checkpoint import read_index
from minidist.fault.folders import parse_step
from minidist.tools.config_file import parse_checkpoint_config
from minidist.tools.config_warnings import describe_learning_rate_jump, find_warnings
from minidist.tools.console.entropy import entropy_rate
from minidist.tools.console.goodput import USEFUL, TimeAccounts
from minidist.tools.console.lines import PlainView
from minidist.tools.console.loss_plot import draw_loss
from minidist.tools.console.metrics import StepMetrics
from minidist.tools.console.metrics_file import MetricsFile, convert_write_errors
from minidist.tools.console.ngram import ngram_losses
from minidist.tools.console.sample_text import sample_text
from minidist.train.agree import StepResult
from minidist.train.observer import Observer
from minidist.train.run_folder import find_run_folder
from minidist.train.trainer import Trainer, without_run_options

_PROMPT_TOKENS = 48


class RunReporter(Observer):
    """Displays a run on the console of rank 0, and writes metrics.jsonl and loss.png into the run folder.

    The other ranks send their metrics to rank 0 and take part in sampling, for which a sharded model needs all ranks.
    clock: returns the Unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._view: PlainView | None = None
        self._file: MetricsFile | None = None
        self._straggler: int | None = None
        self._accounts = TimeAccounts(clock)
        self._step_end_s: float | None = None  # None for a step that was interrupted before it could be reported
        self._useful_s: dict[int, float] = {}  # useful time at the end of the steps whose checkpoints are in flight

    def on_start(self, trainer: Trainer) -> None:
        """On rank 0: open metrics.jsonl and the display, and print the warnings about the run's configuration."""
        self._metrics, step = StepMetrics(trainer), trainer.progress.step
        if trainer.world.rank == 0:
            self._file = open_metrics_file(trainer)
            starting, gap = "resuming" if step else "starting", "between attempts"
            if is_after_recovery(trainer):
                starting = gap = "live recovery"
            self._accounts.continue_from(self._file.earlier_rows, step, gap)
            self._view = create_view(trainer)
            for warning in find_run_warnings(trainer):
                self._view.print_note(warning)
            self._accounts.charge(starting)
            self._file.write_row(describe_start(trainer) | self._accounts.as_row())

    def before_step(self, trainer: Trainer) -> None:
        """Charge the time since the last charge to saving."""
        self._accounts.charge("saving")  # nothing else happens between two steps, but for evaluations

    @contextlib.contextmanager
    def step_context(self, trainer: Trainer) -> Iterator[None]:
        """Return a context manager that measures the step: the bytes sent, the time waited and the time at its end."""
        with self._metrics.measure_step():
            yield
        self._step_end_s = self._accounts.now()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Collective: if a row of metrics is due, gather it from all ranks; rank 0 displays and writes it."""
        step, accounts = trainer.progress.step, self._accounts
        accounts.charge(USEFUL if result.update_successful else "skipped steps", self._step_end_s)
        accounts.charge("saving")
        accounts.step, every = step, trainer.config.checkpoint.every
        if every and step % every == 0:
            self._useful_s[step] = accounts.seconds[USEFUL]
        if self._view:
            self._view.show_step(step, result)
        due = self._metrics.add_step(result)  # all ranks call it
        if self._view and due:
            self._view.show_metrics(*due)
            self._note_straggler(due[0].get("straggler"))
            accounts.charge("reporting")
            self._file.write_row(due[0] | accounts.as_row())

    def _note_straggler(self, straggler: dict | None) -> None:
        """Print a line when a rank begins to keep the others waiting; every row of metrics repeats the rank."""
        rank = straggler and straggler["rank"]
        if rank is not None and rank != self._straggler:
            excess_ms = straggler["excess_s"] * 1e3
            self._view.print_note(f"rank {rank} is a straggler: the others wait {excess_ms:.0f} ms per step for it")
        self._straggler = rank

    def on_evaluation(self, step: int, loss: float) -> None:
        """Display the held-out loss, in nats per token, and write it to metrics.jsonl, on rank 0."""
        self._accounts.charge("evaluation")
        if self._view:
            self._view.show_held_out_loss(step, loss)
            self._file.write_row({"step": step, "held_out_loss": loss} | self._accounts.as_row())
        self._accounts.charge("reporting")

    def on_checkpoint(self, path: Path) -> None:
        """Print the checkpoint's folder, and write its step and the useful time up to that step to metrics.jsonl, on
        rank 0."""
        self.on_note(f"checkpoint: {path}")
        step = parse_step(path)
        useful_s = self._useful_s.pop(step, self._accounts.seconds[USEFUL])
        if self._file is not None:
            self._file.write_row({"saved_step": step, "useful_s": useful_s} | self._accounts.as_row())

    def on_note(self, line: str) -> None:
        """Print the line, on rank 0."""
        if self._view:
            self._view.print_note(line)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Collective: sample text; on rank 0 also draw loss.png, add baselines and goodput to `summary`, and print the
        results.

        A run that a signal has stopped prints how to resume it instead of a sample and losses.
        """
        stopped, corpus = summary["stopped"], trainer.corpus
        prompt = corpus.held_out[:_PROMPT_TOKENS]
        sample = None if stopped else sample_text(trainer.engine, trainer.config, prompt)  # all ranks call it
        if trainer.world.rank:
            return
        baselines = {} if stopped else ngram_losses(corpus)
        summary |= baselines
        if trainer.config.data.path is None and trainer.config.data.source == "synthetic":
            baselines["best possible"] = entropy_rate()
        self._accounts.charge("reporting")
        self._file.write_row({"end": summary["step"]} | self._accounts.as_row())
        summary["goodput"] = self._accounts.goodput
        self._view.close()
        self._view.print_note(self._accounts.describe())
        with convert_write_errors(trainer.folder):
            draw_loss(self._file.rows, baselines, trainer.folder / "loss.png")
        if stopped:
            step, last = summary["step"], trainer.config.train.steps
            then = f"go on with --checkpoint.resume {trainer.folder}"
            if step == last:
                then = f"training is complete, its evaluation is not; run folder: {trainer.folder}"
            self._view.print_note(f"stopped after step {step} of {last}: {then}")
            return
        if sample is not None:
            self._view.show_sample(*sample)
        self._view.show_end(summary["held_out_loss"], baselines)
        self._view.print_note(f"run folder: {trainer.folder}")

    def close(self) -> None:
        """End the display, on rank 0."""
        if self._view:
            self._view.close()


def open_metrics_file(trainer: Trainer) -> MetricsFile:
    """Open the metrics file of a new or resumed run."""
    step, source = trainer.reported_steps, trainer.resumed_from
    return MetricsFile(trainer.folder, without_run_options(trainer.config), step, source and find_run_folder(source))


def describe_start(trainer: Trainer) -> dict[str, Any]:
    """Return the row of metrics.jsonl that describes the start of a run."""
    corpus, step = trainer.corpus, trainer.reported_steps
    return {"start": step, "corpus": corpus.fingerprint, "ranks": trainer.world.size, "text": corpus.describe()}


def find_run_warnings(trainer: Trainer) -> list[str]:
    """Return the warnings about a run's configuration and, if it was resumed, about its learning rate."""
    if is_after_recovery(trainer):
        return []
    found, path = find_warnings(trainer.config, trainer.mesh), trainer.resumed_from
    if path is not None:
        before = parse_checkpoint_config(read_index(path))
        jump = describe_learning_rate_jump(before, trainer.config, trainer.progress.step)
        found = [jump, *found] if jump else found
    return found


def is_after_recovery(trainer: Trainer) -> bool:
    """Return whether this trainer continues a run after a live recovery, in which dead ranks were replaced or left
    out."""
    return trainer.recovery is not None and trainer.recovery.is_after_failure


def create_view(trainer: Trainer) -> PlainView:
    """Create the display of a run: a `LiveView` if standard output is a terminal, else a `PlainView`.

    After a live recovery the display continues in the same output, so the lines that describe the run are not repeated.
    """
    world, config, step = trainer.world, trainer.config, trainer.progress.step
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}"
    backend = f" over {world.backend}" if world.backend else ""
    train = config.train
    header = [
        f"{ranks}{backend}, {trainer.mesh}; model of {config.model.num_parameters():,} parameters",
        trainer.corpus.describe(),
        f"{train.steps} steps of {train.global_batch} samples x {config.data.seq_len} tokens, "
        f"{train.micro_batches} micro-batch{'es' if train.micro_batches > 1 else ''} per rank; "
        f"run folder {trainer.folder}",
    ]
    if step:
        header.append(f"going on after step {step}")
    if is_after_recovery(trainer):
        header = []
    if sys.stdout.isatty():
        from minidist.tools.console.live import LiveView  # here: it imports rich

        return LiveView(header, train.steps, step, stop=trainer.stop_request)
    return PlainView(header)
