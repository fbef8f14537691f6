"""The observer that reports a run: metrics.jsonl, and lines or a live view while it trains; at the end the loss plot,
a sample of the model's text and the n-gram baselines."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minidist.checkpoint.folders import parse_step
from minidist.checkpoint.load import read_index
from minidist.errors import format_count
from minidist.tools.config_warnings import describe_learning_rate_jump, find_warnings
from minidist.tools.console.entropy import entropy_rate
from minidist.tools.console.goodput import USEFUL, TimeAccounts
from minidist.tools.console.lines import PlainView
from minidist.tools.console.loss_plot import draw_loss
from minidist.tools.console.metrics import StepMetrics
from minidist.tools.console.metrics_file import MetricsFile
from minidist.tools.console.ngram import ngram_losses
from minidist.tools.console.sample_text import sample_text
from minidist.train.observer import Observer
from minidist.train.resume import parse_checkpoint_config
from minidist.train.run_folder import find_run_folder
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer, without_run_options

_PROMPT_TOKENS = 48


class RunReporter(Observer):
    """Observer that displays a run on the console of rank 0, and writes metrics.jsonl and loss.png into the run folder.

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
            self._view = _create_view(trainer)
            self._file = open_metrics_file(trainer)
            starting, gap = "resuming" if step else "starting", "between attempts"
            if _is_after_recovery(trainer):
                starting = gap = "live recovery"
            self._accounts.continue_from(self._file.earlier_rows, step, gap)
            self._accounts.is_closed = self._file.is_complete
            if self._file.is_complete:
                self._view.print_note(f"the run in {trainer.folder} is complete: its records stay as they are")
            for warning in _find_run_warnings(trainer):
                self._view.print_note(warning)
            self._accounts.charge(starting)
            self._file.write_row(make_start_row(trainer) | self._accounts.as_row())

    def before_step(self, trainer: Trainer) -> None:
        """Count the time since the last step as time for saving checkpoints (see `TimeAccounts`)."""
        self._accounts.charge("saving")  # nothing else happens between two steps, but for evaluations

    @contextlib.contextmanager
    def step_context(self, trainer: Trainer) -> Iterator[None]:
        """Return a context manager around one step, which measures the bytes sent, the time waited and the step's
        end."""
        with self._metrics.measure_step():
            yield
        self._step_end_s = self._accounts.now()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Collective: if a row of metrics is due after this step, collect it from all ranks; rank 0 prints and writes
        it."""
        step, accounts = trainer.progress.step, self._accounts
        # Where ranks decide on their own steps, one without samples leaves its step to the others.
        is_idle = trainer.engine.control is not trainer.control and result.num_tokens == 0
        accounts.charge(USEFUL if result.update_successful or is_idle else "skipped steps", self._step_end_s)
        accounts.charge("saving")
        accounts.step, every = step, trainer.config.checkpoint.every
        if every and step % every == 0:
            self._useful_s[step] = accounts.seconds[USEFUL]
        due = self._metrics.add_step(result)  # all ranks call it
        if self._view:
            self._view.show_step(step, result)
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

    def on_evaluation(self, step: int, loss: float, num_models: int) -> None:
        """On rank 0, display the held-out loss, in nats per token, and write it to metrics.jsonl."""
        self._accounts.charge("evaluation")
        if self._view:
            self._view.show_held_out_loss(step, loss, num_models)
            models = {"held_out_models": num_models} if num_models > 1 else {}
            self._file.write_row({"step": step, "held_out_loss": loss} | models | self._accounts.as_row())
        self._accounts.charge("reporting")

    def on_checkpoint(self, path: Path) -> None:
        """On rank 0, print the folder of the complete checkpoint and write a row with its step to metrics.jsonl.

        The row also has the useful time (see `TimeAccounts`) up to that step, in seconds.
        """
        self.on_note(f"checkpoint: {path}")
        step = parse_step(path)
        useful_s = self._useful_s.pop(step, self._accounts.seconds[USEFUL])
        if self._file is not None:
            self._file.write_row({"saved_step": step, "useful_s": useful_s} | self._accounts.as_row())

    def on_note(self, line: str) -> None:
        """On rank 0, print the line of text."""
        if self._view:
            self._view.print_note(line)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Collective: sample text from the model; rank 0 prints the final losses and the goodput, and writes loss.png.

        Rank 0 also adds the losses of n-gram models, the goodput and, of asynchronous workers, the number of updates of
        each staleness to `summary`. If a signal has stopped the run, rank 0 prints how to resume the run instead of a
        sample and losses.
        """
        stopped, corpus = summary["stopped"], trainer.corpus
        prompt = corpus.held_out[:_PROMPT_TOKENS]
        sample = None if stopped else sample_text(trainer.engine, trainer.config, prompt)  # all ranks call it
        staleness = _count_staleness(trainer)
        if trainer.world.rank:
            return
        baselines = {} if stopped else ngram_losses(corpus)
        summary |= baselines
        if staleness:
            summary["staleness"] = staleness
        if trainer.config.data.path is None and trainer.config.data.source == "synthetic":
            baselines["best possible"] = entropy_rate()
        self._accounts.charge("reporting")
        row = {"end": summary["step"], "complete": not stopped} | ({"staleness": staleness} if staleness else {})
        self._file.write_row(row | self._accounts.as_row())
        summary["goodput"] = self._accounts.goodput
        self._view.close()
        self._view.print_note(self._accounts.describe())
        if staleness:
            self._view.print_note(_describe_staleness(staleness))
        if not self._file.is_complete:
            picture = trainer.folder / "loss.png"
            try:
                draw_loss(self._file.rows, baselines, picture)
            except OSError as error:
                trainer.note_failed_write(str(picture), error)
        if stopped:
            step, last = summary["step"], trainer.config.train.steps
            then = f"go on with --checkpoint.resume {trainer.folder}"
            if step == last:
                then = f"training is complete, its evaluation is not; run folder: {trainer.folder}"
            self._view.print_note(f"stopped after step {step} of {last}: {then}")
            return
        if sample is not None:
            self._view.show_sample(*sample)
        self._view.show_final_losses(summary["held_out_loss"], baselines)
        self._view.print_note(f"run folder: {trainer.folder}")

    def close(self) -> None:
        """Stop the display, on rank 0."""
        if self._view:
            self._view.close()


def _count_staleness(trainer: Trainer) -> dict[int, int]:
    """Collective: return how many updates of this process had each staleness; {} unless workers are asynchronous."""
    worker = trainer.engine.worker
    if worker is None:
        return {}
    counts = Counter(worker.server.staleness if worker.server else ())
    return dict(sorted(sum(map(Counter, trainer.all_gather_object(dict(counts))), Counter()).items()))


def _describe_staleness(counts: dict[int, int]) -> str:
    """Return a line of text about the staleness of updates. counts: number of updates by staleness."""
    total = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / total
    shares = ", ".join(f"{value}: {count / total:.1%}" for value, count in list(counts.items())[:12])
    more = ", ..." if len(counts) > 12 else ""
    return f"staleness, in updates between pull and push: mean {mean:.2f}, largest {max(counts)}; {shares}{more}"


def open_metrics_file(trainer: Trainer) -> MetricsFile:
    """Open metrics.jsonl in the run folder; a resumed run keeps the rows up to the step from which it resumes."""
    step, source = trainer.reported_steps, trainer.resumed_from
    return MetricsFile(
        trainer.folder,
        without_run_options(trainer.config),
        step,
        source and find_run_folder(source),
        trainer.note_failed_write,
    )


def make_start_row(trainer: Trainer) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the start of a run: completed steps, corpus and number of ranks."""
    corpus, step = trainer.corpus, trainer.reported_steps
    return {"start": step, "corpus": corpus.fingerprint, "ranks": trainer.world.size, "text": corpus.describe()}


def _find_run_warnings(trainer: Trainer) -> list[str]:
    """Return the warnings about a run's configuration and, if it was resumed, about its learning rate."""
    if _is_after_recovery(trainer):
        return []
    found, path = find_warnings(trainer.config, trainer.mesh), trainer.resumed_from
    if path is not None:
        before = parse_checkpoint_config(read_index(path))
        jump = describe_learning_rate_jump(before, trainer.config, trainer.progress.step)
        found = [jump, *found] if jump else found
    return found


def _is_after_recovery(trainer: Trainer) -> bool:
    """Whether this trainer continues a run after a live recovery, in which dead ranks were replaced or left out."""
    return trainer.recovery is not None and trainer.recovery.has_changed_ranks


def _create_view(trainer: Trainer) -> PlainView:
    """Create the display of a run: a `LiveView` if standard output is a terminal, else a `PlainView`.

    After a live recovery the display continues in the same output, so the lines that describe the run are not repeated.
    """
    world, config, step = trainer.world, trainer.config, trainer.progress.step
    ranks = f"{format_count(world.size, 'rank')} on {world.device.type}"
    backend = f" over {world.backend}" if world.backend else ""
    train = config.train
    header = [
        f"{ranks}{backend}, {trainer.mesh}; model of {config.model.num_parameters():,} parameters",
        trainer.corpus.describe(),
        *([trainer.corpus.left_out] if trainer.corpus.left_out else []),
        f"{format_count(train.steps, 'step')} of {format_count(train.global_batch, 'sample')} x {config.data.seq_len} "
        f"tokens, {format_count(train.micro_batches, 'micro-batch', 'micro-batches')} per rank; "
        f"run folder {trainer.folder}",
    ]
    if step:
        header.append(f"going on after step {step}")
    if _is_after_recovery(trainer):
        header = []
    if sys.stdout.isatty():
        from minidist.tools.console.live import LiveView  # here: it imports rich

        return LiveView(header, train.steps, step, stop=trainer.stop_request)
    return PlainView(header)
