"""The interface between the trainer and whatever watches a run: console output, traces, memory measurements.

The trainer knows this class only and runs without any observer. Every rank calls every method of its observers, in
the order in which they were given, so a method may communicate.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.train.agree import StepResult

if TYPE_CHECKING:
    from minidist.train.trainer import Trainer


class Observer:
    """Receives the events of a run. Every method does nothing by default; each overrides those it needs."""

    def check(self) -> None:
        """Raise UserError if this observer cannot write its files. Only rank 0 calls it, before the model is built."""

    def on_start(self, trainer: "Trainer") -> None:
        """The trainer is built, and resumed if asked; no step has run."""

    def before_step(self, trainer: "Trainer") -> None:
        """A step is about to begin; `trainer.progress` says how many are done."""

    def around_step(self, trainer: "Trainer") -> contextlib.AbstractContextManager:
        """Return a context in which the computation of one step runs."""
        return contextlib.nullcontext()

    def on_step(self, trainer: "Trainer", result: StepResult) -> None:
        """A step is done."""

    def on_log(self, row: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """A row of metrics is due. ranks: step time, bytes sent and memory of every rank."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """The held-out loss was measured after a step, in nats per token."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_note(self, line: str) -> None:
        """The trainer or another observer has something to say that is worth a line."""

    def on_last_step(self, trainer: "Trainer") -> None:
        """The last step and its checkpoint are done; the final evaluation follows."""

    def on_end(self, trainer: "Trainer", summary: dict[str, Any]) -> None:
        """The run is over. summary: the result of `train`; an observer may add to it."""

    def close(self) -> None:
        """Release what this observer holds, also after an error."""
