"""The training run: data in order, steps, evaluations on held-out text, checkpoints, and a clean end.

The trainer reports to observers (`train.observer`) and needs none: what a person sees of a run, traces and memory
measurements are tools built on them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from minidist import comm
from minidist.comm import CommError, Meter, World
from minidist.config import Config, MemoryConfig, TraceConfig
from minidist.config_file import to_toml
from minidist.data.corpus import Corpus, open_corpus
from minidist.data.loader import Loader, evaluation_loader
from minidist.errors import UserError, format_ranks
from minidist.fault import checkpoint, folders
from minidist.fault.signals import StopRequest
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.precision.policy import TORCH_NAMES, resolve_policy
from minidist.train import abort, checkpoint_state, metrics, run_folder
from minidist.train.agree import StepResult
from minidist.train.engine import Engine
from minidist.train.observer import Observer
from minidist.train.resume import check_resumable, describe_learning_rate_jump, stored_config
from minidist.train.schedule import learning_rate
from minidist.validation import find_warnings, validate

Result = TypeVar("Result")


@dataclass
class Progress:
    """The position of a run: steps taken and samples consumed. With the configuration they determine the rest."""

    step: int = 0
    position: int = 0


@dataclass
class Pace:
    """Steps since the last log line, and the seconds they took without evaluations and checkpoints."""

    steps: int = 0
    seconds: float = 0.0


def train(
    world: World, config: Config, observers: Sequence[Observer] = (), meter: Meter | None = None
) -> dict[str, Any]:
    """Train on this rank as the configuration says and return a summary of the run. Every rank calls it.

    observers, meter: see `Trainer`. Raises UserError if the run is impossible, RunError if it fails.
    """
    with StopRequest() as stop:
        trainer = Trainer(world, config, observers, meter)
        try:
            return trainer.run(stop)
        except CommError as error:
            raise CommError(f"{error}\n{run_folder.last_checkpoint(trainer.folder)}") from error
        finally:
            for observer in trainer.observers:
                observer.close()


class Trainer:
    """One rank of a run. The constructor builds everything and, if asked, resumes; `run` trains.

    observers: receive the events of the run, in this order. meter: counts the communication; None: one that keeps
    totals only.
    An error that occurs on one rank only (a file that this rank cannot read) is raised on all, so that no rank waits
    for one that has failed.
    """

    def __init__(self, world: World, config: Config, observers: Sequence[Observer] = (), meter: Meter | None = None):
        self.world, self.config, self.observers = world, config, tuple(observers)
        self.mesh = validate(config, world.size)
        meter = Meter(keep=False) if meter is None else meter
        self.groups = comm.bind(
            world, self.mesh, group_specs(self.mesh, config), meter=meter, timeout_s=config.comm.timeout_s
        )
        self.control = self.groups["control"]
        self.all_gather_object = comm.bind_all_gather_object(self.control)
        self._collectively(self._check_observers)
        self.corpus = self._collectively(self._open_corpus)
        self._check_same_corpus()
        model = Transformer(config.model)
        init_parameters(model, config.train.seed)
        self.engine = Engine(
            parallelize(model.to(world.device), self.groups, config), self.groups, config.optim, config.train.seed
        )
        data, train = config.data, config.train
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation_loader(self.corpus.held_out, data.seq_len, train.eval_samples)
        self.progress, self._pace = Progress(), Pace()
        self.stop: StopRequest | None = None
        self._resume_notes: list[str] = []
        self._peak_memory = metrics.PeakMemory(world.device)
        source = None if config.checkpoint.resume is None else self._resume()
        # Rank 0 makes the folder for all ranks, so only rank 0 needs the right to write there.
        folder = self._collectively(lambda: run_folder.claim(config) if world.rank == 0 else None)
        self.folder = self.all_gather_object(folder)[0]
        self.metrics_file = None
        if world.rank == 0:
            step = self.progress.step
            self.metrics_file = run_folder.MetricsFile(self.folder, reusable(config), step, source)
            start = {"start": step, "corpus": self.corpus.fingerprint, "ranks": world.size}
            self.metrics_file.write(start | {"text": self.corpus.describe()})

    def note(self, line: str) -> None:
        """Pass a line on to all observers."""
        for observer in self.observers:
            observer.on_note(line)

    def _check_observers(self) -> None:
        for observer in self.observers if self.world.rank == 0 else ():
            observer.check()

    def _open_corpus(self) -> Corpus:
        data, model = self.config.data, self.config.model
        corpus = open_corpus(data.source, data.path, data.seq_len)
        if corpus.vocab_size > model.vocab_size:
            raise UserError(
                f"the corpus has {corpus.vocab_size} different tokens, the model {model.vocab_size}: "
                f"give --model.vocab-size {corpus.vocab_size} or more."
            )
        return corpus

    def _collectively(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank and return this rank's result; raise a UserError of any rank on all ranks."""
        result, wrong = None, None
        try:
            result = action()
        except UserError as error:
            wrong = str(error)
        ranks: dict[str, list[int]] = {}
        for rank, message in enumerate(self.all_gather_object(wrong)):
            if message is not None:
                ranks.setdefault(message, []).append(rank)
        if ranks:
            message, at = next(iter(ranks.items()))
            raise UserError(message if len(at) == self.world.size else f"{format_ranks(at)}: {message}")
        return result

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train to the last step, or to the step after which any rank was asked to stop. Return the summary."""
        train, meter, stopped = self.config.train, self.groups.meter, False
        self.stop = stop
        for observer in self.observers:
            observer.on_start(self)
        for warning in (*self._resume_notes, *find_warnings(self.config, self.mesh)):
            self.note(warning)
        while self.progress.step < train.steps and not stopped:
            for observer in self.observers:
                observer.before_step(self)
            with meter.span("step", step=self.progress.step + 1):
                stopped = self._step(stop.requested is not None).stop
            step, last = self.progress.step, self.progress.step == train.steps
            if _due(step, train.eval_every) and not last and not stopped:
                self._evaluate()
            if _due(step, self.config.checkpoint.every) or last or stopped:
                self._save()
        for observer in self.observers:
            observer.on_last_step(self)
        return self._finish(stopped and self.progress.step < train.steps)

    def _step(self, stop: bool) -> StepResult:
        config, step, meter = self.config, self.progress.step, self.groups.meter
        start, sent_before = time.perf_counter(), meter.total_wire_bytes
        at = self.mesh.coords(self.world.rank)["dp"]
        data, train = config.data, config.train
        with meter.span("data"):
            batches = self.loader.micro_batches(
                self.progress.position, train.global_batch, at, self.mesh.dp, train.micro_batches, data.shares
            )
        lr = learning_rate(config.optim, step, train.steps)
        weight = data.weights[at] if data.weights else 1.0
        with contextlib.ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.around_step(self))
            result = self.engine.step(step, batches, lr, weight=weight, stop=stop)
        abort.check(
            result,
            step + 1,
            self.engine.scaler,
            self.all_gather_object,
            lambda: run_folder.last_checkpoint(self.folder),
        )
        self.progress = Progress(step + 1, self.progress.position + train.global_batch)
        self._pace.steps += 1
        self._pace.seconds += time.perf_counter() - start
        sent = meter.total_wire_bytes - sent_before
        for observer in self.observers:
            observer.on_step(self, result)
        if _due(self.progress.step, train.log_every) or self.progress.step in (1, train.steps):
            self._log(result, lr, sent)
        return result

    def _log(self, result: StepResult, lr: float, sent: int) -> None:
        config, device = self.config, self.world.device
        mine = {
            "step_time_s": self._pace.seconds / self._pace.steps,
            "comm_bytes": sent,
            "memory": self._peak_memory.read(),
        }
        self._pace = Pace()
        ranks = self.all_gather_object(mine)
        # A step is as slow as its slowest rank, and the rank that uses the most memory must still fit.
        row = {"step": self.progress.step, "tokens": self.progress.position * config.data.seq_len}
        row |= {"loss": result.loss, "grad_norm": None if result.overflow else result.grad_norm, "lr": lr}
        if self.engine.scaler is not None:
            row |= {"loss_scale": self.engine.scaler.scale, "overflow": result.overflow}
        row |= {name: max(rank[name] for rank in ranks) for name in mine}
        row["tokens_per_s"] = config.train.global_batch * config.data.seq_len / row["step_time_s"]
        if peak := metrics.peak_flops(device, TORCH_NAMES[resolve_policy(config.precision).compute]):
            gpus = 1 if config.device.startswith("cuda:") else self.world.size
            flops = config.model.flops_per_token(config.data.seq_len)
            row["mfu"] = metrics.mfu(flops, row["tokens_per_s"], gpus, peak)
            row["mfu_formula"] = metrics.MFU_FORMULA
        for observer in self.observers:
            observer.on_log(row, ranks)
        if self.metrics_file:
            self.metrics_file.write(row)

    def _evaluate(self) -> float:
        at = self.mesh.coords(self.world.rank)["dp"]
        samples = self.held_out.num_samples
        micro_batch = self.config.train.global_batch // self.config.train.micro_batches  # of all dp ranks
        parts = -(-samples // micro_batch)
        with self.groups.meter.span("evaluation"):
            loss = self.engine.evaluate(self.held_out.micro_batches(0, samples, at, self.mesh.dp, parts))
        for observer in self.observers:
            observer.on_evaluation(self.progress.step, loss)
        if self.metrics_file:
            self.metrics_file.write({"step": self.progress.step, "held_out_loss": loss})
        return loss

    def _finish(self, stopped: bool) -> dict[str, Any]:
        summary = {"step": self.progress.step, "stopped": stopped, "folder": str(self.folder)}
        if not stopped:
            summary["held_out_loss"] = self._evaluate()
        for observer in self.observers:
            observer.on_end(self, summary)
        comm.barrier(self.control)  # rank 0 may still be serving the store of the others
        return summary

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        root = self.folder / run_folder.CHECKPOINTS
        state = {
            "config": to_toml(reusable(self.config)),
            "step": self.progress.step,
            "position": self.progress.position,
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.describe(),
            "loss_scaler": None if self.engine.scaler is None else self.engine.scaler.state(),
        }
        pieces = checkpoint_state.pieces(self.engine)
        with self.groups.meter.span("checkpoint"):
            path = checkpoint.save_checkpoint(
                root, self.progress.step, pieces, state, self.all_gather_object, self.control.rank
            )
        if self.world.rank == 0:
            folders.prune_checkpoints(root, self.config.checkpoint.keep, path)
        for observer in self.observers:
            observer.on_checkpoint(path)

    def _resume(self) -> Path | None:
        """Load the checkpoint; return the run folder it is in, None if it is in none."""
        path, state = self._collectively(self._read_checkpoint)
        checkpoint.load_checkpoint(
            path, checkpoint_state.pieces(self.engine), self.all_gather_object, self.control.rank
        )
        self.engine.reducer.after_load()
        if self.engine.scaler is not None and state.get("loss_scaler"):
            self.engine.scaler.load(state["loss_scaler"])
        self.progress = Progress(state["step"], state["position"])
        if note := describe_learning_rate_jump(stored_config(path, state), self.config, state["step"]):
            self._resume_notes.append(note)
        return run_folder.run_of(path)

    def _read_checkpoint(self) -> tuple[Path, dict[str, Any]]:
        path = folders.latest_checkpoint(run_folder.checkpoints_of(self.config.checkpoint.resume))
        index = checkpoint.read_index(path)
        check_resumable(path, index.state, self.config, self.corpus)
        checkpoint_state.prepare(self.engine, index)
        return path, index.state

    def _check_same_corpus(self) -> None:
        found = self.all_gather_object((self.corpus.fingerprint, self.corpus.describe()))
        other = next((rank for rank, (fingerprint, _) in enumerate(found) if fingerprint != found[0][0]), None)
        if other is not None:
            raise UserError(
                f"the ranks read different texts: rank 0 {found[0][1]}; rank {other} {found[other][1]}. "
                "Give all of them the same --data.path (the standard library differs between Python versions)."
            )


def reusable(config: Config) -> Config:
    """Return the configuration without what belongs to one run only: its folder, its origin, its measurements."""
    once = dataclasses.replace(config.checkpoint, resume=None)
    return dataclasses.replace(config, folder=None, checkpoint=once, trace=TraceConfig(), memory=MemoryConfig())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
