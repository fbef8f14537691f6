"""The training run: data in order, steps, evaluations on held-out text, checkpoints, and a clean end.

The trainer reports to observers (`train.observer`) and needs none: log lines, metrics.jsonl, traces and memory
measurements are tools built on them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from minidist import comm
from minidist.checkpoint import folders
from minidist.checkpoint.index import Index
from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.save import CheckpointSaver
from minidist.comm import CommError, Meter, World
from minidist.config import Config, MemoryConfig, TraceConfig, to_toml
from minidist.data.corpus import Corpus, open_corpus
from minidist.data.loader import Loader, evaluation_loader
from minidist.errors import DamagedError, MisfitError, RunError, UserError, format_count
from minidist.fault.collective_errors import ErrorOnAnyRank, run_on_all_ranks
from minidist.fault.signals import StopSignalRecorder
from minidist.learning_rate import learning_rate
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.train import checkpoint_state, run_folder
from minidist.train.engine import Engine
from minidist.train.observer import Observer, Recovery, RegroupRequested
from minidist.train.resume import ChangedOption, check_resumable, inherit_options, load_first_intact
from minidist.train.same_program import check_same_program
from minidist.train.step_result import SkippedSteps, StepResult
from minidist.train.stop_check import StopCheck
from minidist.validation import validate

Result = TypeVar("Result")


@dataclass
class Progress:
    """The position of a run: the numbers of completed steps and of training samples consumed so far."""

    step: int = 0
    consumed_samples: int = 0


def train(
    world: World, config: Config, observers: Sequence[Observer] = (), meter: Meter | None = None
) -> dict[str, Any]:
    """Collective: train on this rank as the configuration says; return a summary.

    observers, meter: see `Trainer`. The summary has "step", the number of completed steps; "stopped", whether the run
    was stopped before its last step; "stop_signal", the signal to stop that this rank received, or None; "folder"; if
    not stopped, "held_out_loss" in nats per token; and what observers add. Raises UserError if the run is impossible,
    RunError if it fails.
    """
    with StopSignalRecorder() as stop:
        trainer = Trainer(world, config, observers, meter)
        try:
            return trainer.run(stop)
        except CommError as error:
            raise CommError(f"{error}\n{run_folder.describe_last_checkpoint(trainer.folder)}") from error
        finally:
            trainer.close()


class Trainer:
    """One rank of a run. The constructor builds everything and, if asked, resumes; `run` trains.

    observers: receive the events of the run, in this order. meter: counts the communication; None for a meter that
    keeps totals only. recovery: if given, dead ranks are replaced while the run goes on: the state may come from the
    memory of the ranks, and `run` raises RegroupRequested when ranks can be added. If the constructor fails on one rank
    (say, it cannot read a file), it raises on all ranks, so that none waits for it.

    Observers read: progress; step_time_s, the duration of the last step in seconds, with loading its data;
    skipped_steps, a `SkippedSteps`; resumed_from, the folder of the checkpoint from which the run was resumed, or None;
    folder, the run's; start_notes, lines for the observers when the run starts; reported_steps, the number of steps
    whose results the observers have received, in this process or before; interrupted_step, the result of a completed
    step that they have not received, because a rank died; world, config, mesh, groups, corpus, engine and recovery.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        observers: Sequence[Observer] = (),
        meter: Meter | None = None,
        recovery: Recovery | None = None,
    ):
        config = inherit_options(config)
        self.world = world
        self.config = config
        self.observers = tuple(observers)
        self.recovery = recovery
        self._unwritable: set[str] = set()  # what the observers could not write, as far as it has been noted
        self.mesh = validate(config, world.size)
        specs = group_specs(self.mesh, config)
        check = partial(check_same_program, config)
        self.groups = comm.bind(
            world,
            self.mesh,
            specs,
            meter=meter or Meter(keep=False),
            timeout_s=config.comm.timeout_s,
            connect_timeout_s=None if recovery is None else recovery.connect_timeout_s,
            check=check,
        )
        self.control = self.groups["control"]
        self.all_gather_object = comm.bind_all_gather_object(self.control)
        self.corpus = self._run_on_all_ranks(self._open_corpus)
        self._check_same_corpus()
        # Rank 0 makes the folder for all ranks, so only rank 0 needs the right to write there.
        run = self.all_gather_object(self._run_on_all_ranks(self._open_run_folder))[0]
        self.folder = run.path
        self.start_notes = run.describe_unfinished_saves()
        self.saver = CheckpointSaver(self.folder / run_folder.CHECKPOINTS, self.all_gather_object, self.control.rank)
        self.saver.gather_object = lambda value: comm.gather_object(value, self.control)
        try:
            self._build(run.checkpoints)
        except BaseException:
            self.close()
            raise

    def _build(self, checkpoints: Sequence[Path]) -> None:
        """Build the engine and load its state. checkpoints: to resume from, in the order to try them."""
        config = self.config
        recovery = self.recovery
        model = Transformer(config.model)
        init_parameters(model, config.train.seed)
        self.engine = Engine(
            parallelize(model.to(self.world.device), self.groups, config), self.groups, config.optim, config.train.seed
        )
        # The ranks do not meet in every step, so that rank 0 must be able to complete a checkpoint alone.
        self.saver.writes_entries = self.engine.control is not self.control
        data = config.data
        train = config.train
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation_loader(self.corpus.held_out, data.seq_len, train.eval_samples)
        self.progress = Progress()
        self.step_time_s = 0.0
        gather = comm.bind_all_gather_object(self.engine.control)
        self.skipped_steps = SkippedSteps(train.max_skipped_steps, self.engine.scaler, gather)
        self.stop_request: StopSignalRecorder | None = None
        # Replicas that merge agree on a stop then, and in between by this check. Asynchronous workers must not: a fast
        # one would wait for a slow one.
        self._stop_check = StopCheck(self.control) if self.engine.merger is not None else None
        self.interrupted_step: StepResult | None = None
        self.resumed_from: Path | None = None
        self._saved_step: int | None = None  # of the last checkpoint that this process has completed
        if recovery is None or not recovery.restore(self):
            self.resumed_from = self._resume(checkpoints)
        self.engine.completed_steps = self.progress.step
        self.reported_steps = self.progress.step - (self.interrupted_step is not None)

    def close(self) -> None:
        """Wait for this rank's checkpoint writer, and close the observers."""
        self.saver.close()
        self._notify("close")

    def send_note(self, line: str) -> None:
        """Call `on_note` of all observers with a line of text."""
        self._notify("on_note", line)

    def note_failed_write(self, what: str, error: OSError) -> None:
        """Send the observers a note that `what`, such as a file, cannot be written: one note for each `what`."""
        if what not in self._unwritable:
            self._unwritable.add(what)
            self.send_note(f"{what} cannot be written: {error.strerror or error}. The run goes on without it.")

    def _notify(self, method: str, *args: Any) -> None:
        """Call a method of all observers. One that cannot write is noted once: the run does not depend on it."""
        for observer in self.observers:
            try:
                getattr(observer, method)(*args)
            except OSError as error:
                self.note_failed_write(f"the output of {type(observer).__name__}", error)

    def _open_corpus(self) -> Corpus:
        data = self.config.data
        model = self.config.model
        corpus = self.recovery.corpus if self.recovery else open_corpus(data.source, data.path, data.seq_len)
        if corpus.vocab_size > model.vocab_size:
            raise UserError(
                f"the corpus has {corpus.vocab_size} different tokens, the model {model.vocab_size}: "
                f"give --model.vocab-size {corpus.vocab_size} or more."
            )
        return corpus

    def _open_run_folder(self) -> run_folder.RunFolder | None:
        if self.world.rank > 0:
            return None
        run = run_folder.open_run_folder(self.config)
        try:
            for observer in self.observers:
                observer.check_folder(run.path)
        except UserError:
            with contextlib.suppress(OSError):
                run.path.rmdir()  # fails if anything is in it, so only an empty folder goes
            raise
        return run

    def _run_on_all_ranks(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank and return this rank's result; raise a UserError of any rank on all ranks."""
        result: list[Result] = []
        try:
            run_on_all_ranks(self.all_gather_object, lambda: result.append(action()))
        except ErrorOnAnyRank as failure:
            if failure.__cause__ is not None and not isinstance(failure.__cause__, UserError):
                raise failure.__cause__ from None  # a bug on this rank
            raise (DamagedError if failure.found_damage else UserError)(str(failure)) from None
        return result[0]

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, stop: StopSignalRecorder) -> dict[str, Any]:
        """Collective: train to the last step, or until a rank has received a signal to stop; return `train`'s summary.

        stop: this rank's signal handler, already entered with `with`. A stopped run saves a checkpoint first.
        """
        train = self.config.train
        meter = self.groups.meter
        recovery = self.recovery
        stopped = False
        self.stop_request = stop
        self._notify("on_start", self)
        for note in self.start_notes:
            self.send_note(note)
        if recovery is not None:
            recovery.on_start(self)
        if self.interrupted_step is not None:
            result = self.interrupted_step
            if self.engine.merger is not None and self.engine.merger.unmerged:
                result = self.engine.finish_merge(self.progress.step - 1, result)
            stopped = self._report_step(result).stop_requested
        while self.progress.step < train.steps and not stopped:
            self._notify("before_step", self)
            with meter.span("step", step=self.progress.step + 1):
                result = self._step()
            stopped = self._report_step(result).stop_requested
            if recovery is not None:
                recovery.on_step(self)
                if result.regroup_requested and not stopped and self.progress.step < train.steps:
                    self._finish_save()
                    self._finish_stop_check()
                    raise RegroupRequested
        self._finish_stop_check()
        self._notify("on_last_step", self)
        return self._finish(stopped and self.progress.step < train.steps)

    def _finish_stop_check(self) -> None:
        if self._stop_check is not None:
            self._stop_check.finish()

    def _is_stop_requested(self) -> bool:
        return self.stop_request.signal_name is not None

    def _step(self) -> StepResult:
        config = self.config
        step = self.progress.step
        meter = self.groups.meter
        start = time.perf_counter()
        at = self.mesh.coords(self.world.rank)["dp"]
        data = config.data
        train = config.train
        with meter.span("data"):
            batches = self.loader.micro_batches(
                self.progress.consumed_samples, train.global_batch, at, self.mesh.dp, train.micro_batches, data.shares
            )
        lr = learning_rate(config.optim, step, train.steps)
        weight = data.weights[at] if data.weights else 1.0
        with contextlib.ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.step_context(self))
            result = self.engine.step(
                step,
                batches,
                lr,
                data_weight=weight,
                global_tokens=self._count_global_tokens() if config.consistency.is_asynchronous else 0.0,
                is_stop_requested=self._is_stop_requested,
                checkpoint_written=self.saver.is_local_write_finished,
                regroup_requested=self.recovery is not None and self.recovery.is_regroup_requested,
            )
        self.progress = Progress(step + 1, self.progress.consumed_samples + train.global_batch)
        self.step_time_s = time.perf_counter() - start
        return result

    def _count_global_tokens(self) -> float:
        """Return the weighted number of tokens of the next global batch, which each rank finds without the others."""
        data = self.config.data
        size = self.config.train.global_batch
        dp = self.mesh.dp
        parts = [
            self.loader.micro_batches(self.progress.consumed_samples, size, at, dp, 1, data.shares) for at in range(dp)
        ]
        weights = data.weights or (1.0,) * dp
        return sum(weight * batch.num_loss_tokens for weight, [batch] in zip(weights, parts, strict=True))

    def _report_step(self, result: StepResult) -> StepResult:
        """Tell the observers of the step just completed; evaluate and save if it is time to.

        Returns the result, in which a rank may meanwhile have asked for the end of the run.
        """
        step = self.progress.step
        train = self.config.train
        stopped = result.stop_requested
        if result.checkpoint_written:
            self._finish_save()
        elif path := self.saver.commit_if_written():
            self._report_checkpoint(path)
        if note := self.skipped_steps.add_step(result, step, self.describe_last_checkpoint):
            self.send_note(note)
        self._notify("on_step", self, result)
        last = step == train.steps
        must_evaluate = _is_due(step, train.eval_every) and not last and not stopped
        if must_evaluate:
            stopped = self._evaluate() is None
        must_save = _is_due(step, self.config.checkpoint.every) or last or stopped
        if must_save:
            self._save(wait=not self.config.checkpoint.background, at_end=last or stopped)
        if not last and not stopped:
            if must_evaluate or must_save:  # which can take longer than a step
                stopped = any(self.all_gather_object(self._is_stop_requested()))
            elif self._stop_check is not None:
                stopped = self._stop_check.is_stop_agreed(step, self._is_stop_requested())
            if stopped:
                self._finish_save()
                if self._saved_step != step:
                    self._save(wait=True, at_end=True)
        self.reported_steps = step
        self.interrupted_step = None
        return dataclasses.replace(result, stop_requested=stopped)

    def _evaluate(self) -> float | None:
        """Return the held-out loss after telling it to the observers; None if a rank asks for the end of the run."""
        at = self.mesh.coords(self.world.rank)["dp"]
        samples = self.held_out.num_samples
        micro_batch = self.config.train.global_batch // self.config.train.micro_batches  # of all dp ranks
        parts = -(-samples // micro_batch)
        with self.groups.meter.span("evaluation"):
            batches = self.held_out.micro_batches(0, samples, at, self.mesh.dp, parts)
            loss = self.engine.evaluate(batches, self.config.train.micro_batches, self._is_stop_requested)
        num_models = 1 if self.engine.merger is None else self.engine.merger.num_different_models
        if loss is not None:
            self._notify("on_evaluation", self.progress.step, loss, num_models)
        return loss

    def _finish(self, stopped: bool) -> dict[str, Any]:
        loss = None if stopped else self._evaluate()
        summary = {"step": self.progress.step, "stopped": loss is None, "folder": str(self.folder)}
        summary["stop_signal"] = self.stop_request.signal_name
        if loss is not None:
            summary["held_out_loss"] = loss
        self._notify("on_end", self, summary)
        comm.barrier(self.control)  # rank 0 may still be serving the store of the others
        return summary

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, wait: bool, at_end: bool) -> None:
        """Save a checkpoint. wait: until it is complete; if False, a later step finishes it.

        at_end: whether the run ends here; then wait in any case, and end the run with an error if the save fails.
        """
        self._notify("before_save", self)
        wait = wait or at_end
        state = {
            "config": to_toml(without_run_options(self.config)),
            "step": self.progress.step,
            "position": self.progress.consumed_samples,
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.describe(),
            "replicas": self.config.num_replicas(self.mesh),
            "loss_scaler": None if self.engine.scaler is None else self.engine.scaler.state_dict(),
        }
        self._finish_save()
        not_finite = self.all_gather_object(checkpoint_state.find_first_non_finite(self.engine))
        if found := sum(not_finite, []):
            raise RunError(
                f"the state after step {self.progress.step} is not finite, so it is not saved; the first tensor that "
                f"is not: {found[0]}. Lower --optim.lr. {self.describe_last_checkpoint()}"
            )
        shards = checkpoint_state.checkpoint_shards(self.engine)
        with self.groups.meter.span("checkpoint"):
            try:
                self.saver.start_save(self.progress.step, shards, state, copy=not wait)
            except RunError as error:
                self._note_failed_save(error, fatal=at_end)
        if wait:
            self._finish_save(fatal=at_end)

    def _finish_save(self, fatal: bool = False) -> None:
        """Complete the checkpoint that is being saved, if any. fatal: end the run if it could not be saved."""
        if not self.saver.is_saving:
            return
        try:
            with self.groups.meter.span("wait for checkpoint"):
                path = self.saver.finish_save()
        except RunError as error:
            self._note_failed_save(error, fatal)
            return
        self._report_checkpoint(path)

    def _report_checkpoint(self, path: Path) -> None:
        """Tell the observers about a complete checkpoint, once; on rank 0, delete the old ones first."""
        if folders.parse_step(path) == self._saved_step:
            return
        if self.world.rank == 0:
            how = self.config.checkpoint
            folders.prune_checkpoints(self.saver.root, how.keep, path, how.keep_every)
        self._saved_step = folders.parse_step(path)
        self._notify("on_checkpoint", path)

    def _note_failed_save(self, error: RunError, fatal: bool) -> None:
        if fatal or isinstance(error, CommError):  # without its peers no rank can go on
            raise error
        self.send_note(f"{error} The run goes on.")

    def describe_last_checkpoint(self) -> str:
        """Return a sentence about the last checkpoint, for the message of an error. Collective during a save."""
        if self.engine.control is self.control:  # else one replica may be here alone
            self._finish_save()
        return run_folder.describe_last_checkpoint(self.folder)

    def _resume(self, checkpoints: Sequence[Path]) -> Path | None:
        """Load the first intact checkpoint and return its folder; None if there is no checkpoint at all.

        A damaged one is noted, and the next one tried; raises UserError if all are damaged.
        """
        path, damaged = load_first_intact(checkpoints, self._load)
        self.start_notes += damaged
        return path

    def _load(self, path: Path) -> None:
        index, changed = self._run_on_all_ranks(lambda: self._read_index(path))
        # Only another precision than that of the checkpoint, which its options give, asks for other dtypes.
        cast = any(option.name.startswith("precision.") for option in changed)
        shards = checkpoint_state.checkpoint_shards(self.engine)
        try:
            load_checkpoint(path, shards, self.all_gather_object, self.control.rank, cast=cast)
        except MisfitError as error:
            raise DamagedError(f"{path} is damaged: its tensors are not those of its own options. {error}") from error
        self.after_load(index.state)
        self.start_notes += [
            f"--{option.name} is {option.now}; it was {option.before} until step {index.step}" for option in changed
        ]
        if cast:
            self.start_notes.append(f"{path} is converted to the dtypes of this precision")

    def after_load(self, state: dict[str, Any]) -> None:
        """Collective: continue from a state whose tensors have just been loaded. state: the `Index.state`."""
        self.engine.reducer.after_load()
        if self.engine.scaler is not None and state.get("loss_scaler"):
            self.engine.scaler.load_state_dict(state["loss_scaler"])
        self.progress = Progress(state["step"], state["position"])

    def _read_index(self, path: Path) -> tuple[Index, list[ChangedOption]]:
        index = read_index(path)
        changed = check_resumable(index, self.config, self.corpus)
        if (saved := index.state.get("replicas", 1)) != (replicas := self.config.num_replicas(self.mesh)):
            raise UserError(
                f"{path} has the state of {format_count(saved, 'replica')}, this run has {replicas}: give "
                f"--consistency.replicas {saved}, or start a new run."
            )
        try:
            checkpoint_state.create_optimizer_states(self.engine, index.tensors)
        except DamagedError as error:
            raise DamagedError(f"{path} is damaged: {error}") from None
        return index, changed

    def _check_same_corpus(self) -> None:
        found = self.all_gather_object((self.corpus.fingerprint, self.corpus.describe()))
        other = next((rank for rank, (fingerprint, _) in enumerate(found) if fingerprint != found[0][0]), None)
        if other is not None:
            raise UserError(
                f"the ranks read different texts: rank 0 {found[0][1]}; rank {other} {found[other][1]}. "
                "Give all of them the same --data.path (the standard library differs between Python versions)."
            )


def without_run_options(config: Config) -> Config:
    """Return `config` without the options of a single run: folder, what to resume, fault.inject, trace, memory."""
    once = dataclasses.replace(config.checkpoint, resume=None, inherit=True)
    fault = dataclasses.replace(config.fault, inject=None)
    return dataclasses.replace(
        config, folder=None, checkpoint=once, fault=fault, trace=TraceConfig(), memory=MemoryConfig()
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
