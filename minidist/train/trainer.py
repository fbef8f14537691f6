"""The training run: data in order, steps, looks at held-out text, checkpoints, and a clean end."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from minidist import comm
from minidist.comm import CommError, World
from minidist.config import Config, MemoryConfig, TraceConfig
from minidist.config_file import to_toml
from minidist.data.corpus import Corpus, open_corpus
from minidist.data.loader import Loader, evaluation
from minidist.errors import UserError
from minidist.fault import checkpoint, folders
from minidist.fault.signals import StopRequest
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import parallelize, uses
from minidist.precision.policy import TORCH_NAMES, policy_of
from minidist.tools.console import loss_plot as picture
from minidist.tools.console.ngram import baselines
from minidist.tools.console.reporter import make_reporter
from minidist.tools.console.sample_text import sample_text
from minidist.tools.deadlock.status_report import rank_names
from minidist.tools.memory.tracker import Tracker
from minidist.tools.trace.trace import Trace, make_meter
from minidist.train import abort as giveup
from minidist.train import checkpoint_state as state
from minidist.train import metrics
from minidist.train import run_folder as runfolder
from minidist.train.agree import StepResult
from minidist.train.engine import Engine
from minidist.train.resume import check_resumable
from minidist.train.schedule import learning_rate
from minidist.validation import find_warnings, validate

Made = TypeVar("Made")


@dataclass
class Progress:
    """Where a run is: steps taken and samples consumed. With the configuration it determines everything to come."""

    step: int = 0
    position: int = 0


@dataclass
class Pace:
    """Steps since the last log line, and the seconds they took; evaluations and checkpoints are left out."""

    steps: int = 0
    seconds: float = 0.0


def train(world: World, config: Config) -> dict:
    """Train as the configuration says, on this rank; every rank calls it. Returns the summary of the run.

    Raises UserError for what cannot run, RunError when the run fails.
    """
    with StopRequest() as stop:
        trainer = Trainer(world, config)
        try:
            return trainer.run(stop)
        except CommError as error:
            raise CommError(f"{error}\n{runfolder.last_checkpoint(trainer.folder)}") from error
        finally:
            trainer.reporter.close()


class Trainer:
    """One rank of a run. The constructor builds and, if asked, resumes; `run` trains.

    What is wrong on one rank alone (a file that only it does not see) is raised on all: nobody waits for it in vain.
    """

    def __init__(self, world: World, config: Config):
        self.world, self.config = world, config
        self.mesh = validate(config, world.size)
        meter = make_meter(config.trace)
        self.groups = comm.bind(world, self.mesh, uses(self.mesh, config), meter=meter, timeout_s=config.comm.timeout_s)
        self.control = self.groups["control"]
        self.swap = comm.bind_all_gather_object(self.control)
        self._together(lambda: runfolder.check_outputs(config) if world.rank == 0 else None)
        self.trace = Trace(config.trace, self.groups)
        self.corpus = self._together(self._open_corpus)
        self._check_same_corpus()
        model = Transformer(config.model)
        init_parameters(model, config.train.seed)
        self.engine = Engine(
            parallelize(model.to(world.device), self.groups, config), self.groups, config.optim, config.train.seed
        )
        data, train = config.data, config.train
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation(self.corpus.held_out, data.seq_len, train.eval_samples)
        self.progress, self._pace = Progress(), Pace()
        source = None if config.checkpoint.resume is None else self._resume()
        self.memory = Tracker(config, self.engine, self.progress.step)
        # Rank 0 writes for all, so it alone must be able to.
        made = self._together(lambda: runfolder.claim(config) if world.rank == 0 else None)
        self.folder = self.swap(made)[0]
        self.metrics = None
        if world.rank == 0:
            self.metrics = runfolder.Metrics(self.folder, reusable(config), self.progress.step, source)
            begun = {"start": self.progress.step, "corpus": self.corpus.fingerprint, "ranks": world.size}
            self.metrics.write(begun | {"text": self.corpus.describe()})
        self.reporter = make_reporter(world, config, self.mesh, self.corpus.describe(), self.folder, self.progress.step)
        for warning in find_warnings(config, self.mesh):
            self.reporter.note(warning)

    def _open_corpus(self) -> Corpus:
        data, model = self.config.data, self.config.model
        corpus = open_corpus(data.source, data.path, data.seq_len)
        if corpus.vocab_size > model.vocab_size:
            raise UserError(
                f"the corpus has {corpus.vocab_size} different tokens, the model {model.vocab_size}: "
                f"give --model.vocab-size {corpus.vocab_size} or more."
            )
        return corpus

    def _together(self, action: Callable[[], Made]) -> Made:
        """What `action`, run on every rank, gives on this one; a UserError of any rank is raised on all."""
        result, wrong = None, None
        try:
            result = action()
        except UserError as error:
            wrong = str(error)
        ranks: dict[str, list[int]] = {}
        for rank, message in enumerate(self.swap(wrong)):
            if message is not None:
                ranks.setdefault(message, []).append(rank)
        if ranks:
            message, at = next(iter(ranks.items()))
            raise UserError(message if len(at) == self.world.size else f"{rank_names(at)}: {message}")
        return result

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, stop: StopRequest) -> dict:
        """Train to the last step, or to the step after which any rank was asked to stop. Returns the summary."""
        train, meter, stopped = self.config.train, self.groups.meter, False
        while self.progress.step < train.steps and not stopped:
            self.trace.at(self.progress.step)
            with meter.span("step", step=self.progress.step + 1):
                stopped = self._step(stop.requested is not None).stop
            self.memory.gather()
            step, last = self.progress.step, self.progress.step == train.steps
            if _due(step, train.eval_every) and not last and not stopped:
                self._evaluate()
            if _due(step, self.config.checkpoint.every) or last or stopped:
                self._save()
        self.trace.finish(self.progress.step)
        return self._finish(stopped and self.progress.step < train.steps)

    def _step(self, stop: bool) -> StepResult:
        config, step = self.config, self.progress.step
        start, sent = time.perf_counter(), self.groups.meter.total_wire_bytes
        at = self.mesh.coords(self.world.rank)["dp"]
        data, train = config.data, config.train
        with self.groups.meter.span("data"):
            batches = self.loader.micro_batches(
                self.progress.position, train.global_batch, at, self.mesh.dp, train.micro_batches, data.shares
            )
        lr = learning_rate(config.optim, step, train.steps)
        weight = data.weights[at] if data.weights else 1.0
        result = self.memory.during(step + 1, lambda: self.engine.step(step, batches, lr, weight=weight, stop=stop))
        giveup.check(result, step + 1, self.engine.scaler, self.swap, lambda: runfolder.last_checkpoint(self.folder))
        self.progress = Progress(step + 1, self.progress.position + train.global_batch)
        self._pace.steps += 1
        self._pace.seconds += time.perf_counter() - start
        self.reporter.step(self.progress.step, result)
        if _due(self.progress.step, train.log_every) or self.progress.step in (1, train.steps):
            self._log(result, lr, self.groups.meter.total_wire_bytes - sent)
        return result

    def _log(self, result: StepResult, lr: float, sent: int) -> None:
        config, device = self.config, self.world.device
        mine = {
            "step_time_s": self._pace.seconds / self._pace.steps,
            "comm_bytes": sent,
            "memory": metrics.peak_memory(device),
        }
        self._pace = Pace()
        lanes = self.swap(mine)
        # A step is as slow as its slowest rank, and the rank that holds most must still fit.
        row = {"step": self.progress.step, "tokens": self.progress.position * config.data.seq_len}
        row |= {"loss": result.loss, "grad_norm": None if result.overflow else result.grad_norm, "lr": lr}
        if self.engine.scaler is not None:
            row |= {"loss_scale": self.engine.scaler.scale, "overflow": result.overflow}
        row |= {name: max(lane[name] for lane in lanes) for name in mine}
        row["tokens_per_s"] = config.train.global_batch * config.data.seq_len / row["step_time_s"]
        if peak := metrics.peak_flops(device, TORCH_NAMES[policy_of(config.precision).compute]):
            gpus = 1 if config.device.startswith("cuda:") else self.world.size
            flops = config.model.flops_per_token(config.data.seq_len)
            row["mfu"] = metrics.mfu(flops, row["tokens_per_s"], gpus, peak)
            row["mfu_formula"] = metrics.MFU_FORMULA
        self.reporter.log(row, lanes)
        if self.metrics:
            self.metrics.write(row)

    def _evaluate(self) -> float:
        at = self.mesh.coords(self.world.rank)["dp"]
        samples = self.held_out.num_samples
        parts = -(-samples // self.config.train.global_batch)
        with self.groups.meter.span("evaluation"):
            loss = self.engine.evaluate(self.held_out.micro_batches(0, samples, at, self.mesh.dp, parts))
        self.reporter.held_out(self.progress.step, loss)
        if self.metrics:
            self.metrics.write({"step": self.progress.step, "held_out_loss": loss})
        return loss

    def _finish(self, stopped: bool) -> dict:
        summary = {"step": self.progress.step, "stopped": stopped, "folder": str(self.folder)}
        if not stopped:
            summary["held_out_loss"] = self._evaluate()
        text = None if stopped else sample_text(self.engine, self.config, self.corpus.held_out[:48])
        if self.world.rank == 0:
            summary |= {} if stopped else baselines(self.corpus)
            self.reporter.close()
            self._tell_the_end(summary, text)
        comm.barrier(self.control)  # rank 0 may still be serving the others' store
        return summary

    def _tell_the_end(self, summary: dict, text: tuple[str, str] | None) -> None:
        """What rank 0 says and draws when training is over."""
        lines = {name: summary[name] for name in ("unigram", "bigram") if name in summary}
        if self.corpus.entropy_rate is not None:
            lines["best possible"] = self.corpus.entropy_rate
        with runfolder.writing(self.folder):
            picture.draw_loss(self.metrics.rows, lines, self.folder / "loss.png")
        for line in filter(None, (self.trace.line, self.memory.line)):
            self.reporter.note(line)
        if summary["stopped"]:
            steps = f"{summary['step']} of {self.config.train.steps}"
            self.reporter.note(f"stopped after step {steps}: go on with --checkpoint.resume {self.folder}")
            return
        if text is not None:
            self.reporter.text(*text)
        self.reporter.end(summary["held_out_loss"], lines)
        self.reporter.note(f"run folder: {self.folder}")

    # -- what survives ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        root = self.folder / runfolder.CHECKPOINTS
        kept = {
            "config": to_toml(reusable(self.config)),
            "step": self.progress.step,
            "position": self.progress.position,
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.describe(),
            "loss_scaler": None if self.engine.scaler is None else self.engine.scaler.state(),
        }
        made = state.pieces(self.engine)
        with self.groups.meter.span("checkpoint"):
            path = checkpoint.save(root, self.progress.step, made, kept, self.swap, self.control.rank)
        if self.world.rank == 0:
            folders.prune(root, self.config.checkpoint.keep, path)
            self.reporter.note(f"checkpoint: {path}")

    def _resume(self):
        """Take over what the checkpoint holds; returns its run folder, None when it lies in none."""
        path, kept = self._together(self._read_checkpoint)
        checkpoint.load(path, state.pieces(self.engine), self.swap, self.control.rank)
        self.engine.reducer.after_load()
        if self.engine.scaler is not None and kept.get("loss_scaler"):
            self.engine.scaler.load(kept["loss_scaler"])
        self.progress = Progress(kept["step"], kept["position"])
        return runfolder.run_of(path)

    def _read_checkpoint(self):
        path = folders.latest(runfolder.checkpoints_of(self.config.checkpoint.resume))
        index = checkpoint.read_index(path)
        check_resumable(path, index.state, self.config, self.corpus)
        state.prepare(self.engine, index)
        return path, index.state

    def _check_same_corpus(self) -> None:
        found = self.swap((self.corpus.fingerprint, self.corpus.describe()))
        other = next((rank for rank, (fingerprint, _) in enumerate(found) if fingerprint != found[0][0]), None)
        if other is not None:
            raise UserError(
                f"the ranks read different texts: rank 0 {found[0][1]}; rank {other} {found[other][1]}. "
                "Give all of them the same --data.path (the standard library differs between Python versions)."
            )


def reusable(config: Config) -> Config:
    """The configuration without what belongs to one run: its folder, where it went on from, what was looked at."""
    once = dataclasses.replace(config.checkpoint, resume=None)
    return dataclasses.replace(config, folder=None, checkpoint=once, trace=TraceConfig(), memory=MemoryConfig())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
