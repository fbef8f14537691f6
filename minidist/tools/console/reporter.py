"""The observer that shows a run to a person: lines or a live view while it trains; at the end the loss plot, a sample
of the model's text and the n-gram baselines."""

import sys
from pathlib import Path
from typing import Any

from minidist.tools.console.lines import PlainView
from minidist.tools.console.loss_plot import draw_loss
from minidist.tools.console.ngram import baselines
from minidist.tools.console.sample_text import sample_text
from minidist.train import run_folder
from minidist.train.agree import StepResult
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer

_PROMPT_TOKENS = 48


class Reporter(Observer):
    """Shows a run on rank 0. The other ranks only take part in sampling, which a sharded model needs all ranks for."""

    def __init__(self):
        self._view: PlainView | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.rank == 0:
            self._view = make_view(trainer)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._view:
            self._view.show_step(trainer.progress.step, result)

    def on_log(self, row: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        if self._view:
            self._view.show_metrics(row, ranks)

    def on_evaluation(self, step: int, loss: float) -> None:
        if self._view:
            self._view.show_held_out_loss(step, loss)

    def on_checkpoint(self, path: Path) -> None:
        self.on_note(f"checkpoint: {path}")

    def on_note(self, line: str) -> None:
        if self._view:
            self._view.note(line)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        stopped, corpus = summary["stopped"], trainer.corpus
        prompt = corpus.held_out[:_PROMPT_TOKENS]
        sample = None if stopped else sample_text(trainer.engine, trainer.config, prompt)  # all ranks call it
        if trainer.world.rank:
            return
        lines = {} if stopped else baselines(corpus)
        summary |= lines
        if corpus.entropy_rate is not None:
            lines["best possible"] = corpus.entropy_rate
        self._view.close()
        with run_folder.writing(trainer.folder):
            draw_loss(trainer.metrics_file.rows, lines, trainer.folder / "loss.png")
        if stopped:
            steps = f"{summary['step']} of {trainer.config.train.steps}"
            self._view.note(f"stopped after step {steps}: go on with --checkpoint.resume {trainer.folder}")
            return
        if sample is not None:
            self._view.show_sample(*sample)
        self._view.show_end(summary["held_out_loss"], lines)
        self._view.note(f"run folder: {trainer.folder}")

    def close(self) -> None:
        if self._view:
            self._view.close()


def make_view(trainer: Trainer) -> PlainView:
    """Make the view of a run: a live view on a terminal, plain lines elsewhere."""
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
    if sys.stdout.isatty():
        from minidist.tools.console.live import LiveView  # here: it imports rich

        return LiveView(header, train.steps, step, stop=trainer.stop)
    return PlainView(header)
