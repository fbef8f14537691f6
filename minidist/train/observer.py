"""The interfaces between the trainer and tools: observers, and live recovery.

An observer watches a run: console output, traces, memory measurements. The trainer runs without any. Every rank calls
every method of its observers except `check_folder`, in the order in which they were given, so a method may communicate.

An observer cannot end a run by failing to write: the trainer notes an OSError of a method once, and goes on. A method
that communicates does so before it writes, since an OSError ends it on one rank alone.
"""

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.data.corpus import Corpus

if TYPE_CHECKING:
    from minidist.train.step_result import StepResult
    from minidist.train.trainer import Trainer


class Observer:
    """Base class of observers, which receive the events of a run. Every method does nothing by default."""

    def check_folder(self, folder: Path) -> None:
        """Raise UserError if this observer cannot write to the run's existing `folder`, or the run must not use it.

        Only rank 0 calls it, before the model is built.
        """

    def on_start(self, trainer: "Trainer") -> None:
        """Called when the trainer is built and has loaded the checkpoint to resume, if any; before the first step."""

    def before_step(self, trainer: "Trainer") -> None:
        """Called before each step; `trainer.progress.step` is the number of completed steps."""

    def step_context(self, trainer: "Trainer") -> contextlib.AbstractContextManager:
        """Return a context manager inside which the trainer runs `Engine.step`, once per step."""
        return contextlib.nullcontext()

    def on_step(self, trainer: "Trainer", result: "StepResult") -> None:
        """Called after each step, with its outcome."""

    def on_evaluation(self, step: int, loss: float, num_models: int) -> None:
        """Called after an evaluation. step: number of completed steps. loss: held-out loss in nats per token.

        num_models: 1; or the number of replicas that train separately and differ now, of which each has evaluated its
        part of the held-out text.
        """

    def before_save(self, trainer: "Trainer") -> None:
        """Called before a checkpoint is saved; may raise RunError on all ranks to end the run without it."""

    def on_checkpoint(self, path: Path) -> None:
        """Called when a checkpoint is complete. path: its folder.

        Rank 0 may call it some steps before the other ranks, so this method must not communicate.
        """

    def on_note(self, line: str) -> None:
        """Called with each line of text that the trainer or another observer passed to `Trainer.send_note`."""

    def on_last_step(self, trainer: "Trainer") -> None:
        """Called after the last step and its checkpoint, before the final evaluation."""

    def on_end(self, trainer: "Trainer", summary: dict[str, Any]) -> None:
        """Called at the end of the run. summary: what `train` will return; an observer may add entries to it."""

    def close(self) -> None:
        """Release the resources of this observer. Called at the end of a run, also after an error.

        Not called if the trainer's constructor fails before it builds the model, for example for want of a corpus.
        """


class RegroupRequested(Exception):
    """Raised by `Trainer.run` on all ranks after a step, if the run can go on with more ranks in new process groups."""


class Recovery(ABC):
    """Interface of live recovery: what a process keeps from trainer to trainer while ranks die and are replaced.

    corpus: the training text, for every trainer of this process. connect_timeout_s: seconds after which the creation of
    a process group fails, as a rank may die meanwhile. has_changed_ranks: whether ranks have died, left or joined
    since the run began. is_regroup_requested: whether more ranks can be used now, as far as this rank knows.
    """

    corpus: Corpus
    connect_timeout_s: float
    has_changed_ranks: bool
    is_regroup_requested: bool

    @abstractmethod
    def restore(self, trainer: "Trainer") -> bool:
        """Collective: load the newest state in the ranks' memory into a new trainer; return whether there is one."""

    @abstractmethod
    def on_start(self, trainer: "Trainer") -> None:
        """Called on all ranks when a trainer starts to train; may use collectives."""

    @abstractmethod
    def on_step(self, trainer: "Trainer") -> None:
        """Called on all ranks when a step has been completed and reported; may use collectives."""
