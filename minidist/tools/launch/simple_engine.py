"""`minidist train --engine simple`: the simple trainer with the run folder, the observers and the signals of a command.

The simple trainer knows nothing of these. This module gives it what the fast trainer has built in: the choice of the
run folder, the check that a run may resume from a checkpoint, the attributes that observers read, and a stop by signal.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from minidist.checkpoint.load import read_index
from minidist.comm import CommError, Meter, World, bind_all_gather_object
from minidist.config import Config, to_toml
from minidist.errors import UserError
from minidist.fault.signals import StopSignalRecorder
from minidist.simple.checkpoint import on_all_ranks
from minidist.simple.mixed_precision import Decision
from minidist.simple.trainer import Trainer
from minidist.tools.chaos.faults import parse_fault
from minidist.tools.chaos.injector import flip_bit_of_first_element
from minidist.train import run_folder
from minidist.train.observer import Observer
from minidist.train.resume import check_resumable
from minidist.train.stop_check import StopCheck
from minidist.train.trainer import without_run_options
from minidist.validation import validate


class SimpleTrainer(Trainer):
    """The simple trainer with the attributes and events that `minidist.train.observer.Observer` describes.

    stop: records the signals that ask for the end of the run. Raises UserError on all ranks if the run is impossible.
    """

    recovery = None
    skipped_steps = None  # `train.max_skipped_steps` is refused

    def __init__(
        self, world: World, config: Config, observers: Sequence[Observer], meter: Meter, stop: StopSignalRecorder
    ):
        validate(config, world.size)
        self.stop_request = stop
        inject = config.fault.inject
        self.bit_flip = None if inject is None else parse_fault(inject, world.size)  # `validate` accepts no other fault
        self.start_notes: list[str] = []
        self._unwritable: set[str] = set()
        self._is_started = False
        super().__init__(world, config, observers, meter)
        self.config_text = to_toml(without_run_options(config))
        self.all_gather_object = bind_all_gather_object(self.control)
        self.engine.worker = None  # of asynchronous training
        self.stop_check = None if self.engine.merger is None else StopCheck(self.control)

    def open_folder(self) -> tuple[Path, list[Path]]:
        """Collective: rank 0 chooses and creates the folder, and its observers lock it; return it and checkpoints."""

        def open_on_rank_0() -> run_folder.RunFolder | None:
            if self.world.rank:
                return None
            run = run_folder.open_run_folder(self.config)
            for observer in self.observers:
                observer.check_folder(run.path)
            return run

        run = on_all_ranks(open_on_rank_0, self.control)[0]
        self.start_notes += run.describe_unfinished_saves()
        return run.path, list(run.checkpoints)

    def check_resume(self, path: Path) -> None:
        """Collective: raise UserError if a run of these options may not continue from a checkpoint."""
        self.start_notes += on_all_ranks(partial(self._describe_changed_options, path), self.control)[self.world.rank]

    def _describe_changed_options(self, path: Path) -> list[str]:
        """Return a line for each option that differs from the run that wrote the checkpoint `path`.

        Raises UserError if the run cannot resume with these options.
        """
        index = read_index(path)
        changed = check_resumable(index, self.config, self.corpus)
        if converted := [option.name for option in changed if option.name.startswith("precision.")]:
            raise UserError(
                f"{path} has another --{converted[0]}, and the simple engine converts no dtypes: give --engine fast."
            )
        step = index.state["step"]
        return [f"--{option.name} is {option.now}; it was {option.before} until step {step}" for option in changed]

    def run(self) -> dict[str, Any]:
        """Collective: train to the last step, or until a rank has received a signal; return a summary of the run."""
        self._is_started = True
        self.notify("on_start", self)
        for line in self.start_notes:
            self.send_note(line)
        try:
            return super().run()
        except CommError as error:
            raise CommError(f"{error}\n{run_folder.describe_last_checkpoint(self.folder)}") from error

    def step(self) -> Decision:
        """Collective: train on the next global batch, inside the contexts of all observers."""
        self.notify("before_step", self)
        with contextlib.ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.step_context(self))
            decision = super().step()
        flip = self.bit_flip
        if flip is not None and (flip.rank, flip.step) == (self.world.rank, self.progress.step):
            flip_bit_of_first_element(max(self.engine.model.parameters(), key=Tensor.numel))
        return decision

    def save(self) -> None:
        """Collective: save a checkpoint. Raises RunError if an observer objects."""
        self.notify("before_save", self)
        super().save()

    @property
    def reported_steps(self) -> int:
        """The number of steps whose results the observers have received."""
        return self.progress.step

    def is_stop_requested(self) -> bool:
        """Return whether this rank has received a signal to stop."""
        return self.stop_request.signal_name is not None

    def agree_on_stop(self, decision: Decision) -> bool:
        """Collective: return whether any rank asks for the end; between merges by `StopCheck`."""
        is_agreed, step = super().agree_on_stop(decision), self.progress.step
        if self.stop_check is None or is_agreed or step == self.config.train.steps:
            return is_agreed
        return self.stop_check.is_stop_agreed(step, self.is_stop_requested())

    def notify(self, event: str, *args: Any) -> None:
        """Call a method of all observers. One that cannot write is noted once: the run does not depend on it."""
        if event == "on_note" and not self._is_started:
            self.start_notes.append(*args)
            return
        if event == "on_last_step" and self.stop_check is not None:
            self.stop_check.finish()
        if event == "on_end":
            _, summary = args
            summary["stop_signal"] = self.stop_request.signal_name
        for observer in self.observers:
            try:
                getattr(observer, event)(*args)
            except OSError as error:
                self.note_failed_write(f"the output of {type(observer).__name__}", error)

    def send_note(self, line: str) -> None:
        """Call `on_note` of all observers with a line of text."""
        self.notify("on_note", line)

    def note_failed_write(self, what: str, error: OSError) -> None:
        """Send the observers a note that `what`, such as a file, cannot be written. The first time only."""
        if what not in self._unwritable:
            self._unwritable.add(what)
            self.send_note(f"{what} cannot be written: {error.strerror or error}. The run goes on without it.")

    def describe_last_checkpoint(self) -> str:
        """Return a sentence about the last checkpoint, for the message of an error."""
        return run_folder.describe_last_checkpoint(self.folder)


def train_simple(world: World, config: Config, observers: Sequence[Observer], meter: Meter) -> dict[str, Any]:
    """Collective: train with the simple engine; return the summary of the run, as `minidist.train.trainer.train`."""
    with StopSignalRecorder() as stop:
        try:
            return SimpleTrainer(world, config, observers, meter, stop).run()
        finally:
            for observer in observers:
                with contextlib.suppress(OSError):
                    observer.close()
