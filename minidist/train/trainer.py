"""The training run: data in order, steps, looks at held-out text, checkpoints, and a clean end."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from minidist import comm
from minidist.comm import Meter, World
from minidist.config import Config, check
from minidist.configfile import from_text, to_toml
from minidist.data.corpus import open_corpus
from minidist.data.loader import Loader, evaluation
from minidist.data.ngram import baselines
from minidist.errors import RunError, UserError
from minidist.fault import checkpoint, folders
from minidist.fault.signals import StopRequest
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import USES, parallelize
from minidist.train import metrics, runfolder, state
from minidist.train.report import make_reporter
from minidist.train.sample import continue_text
from minidist.train.schedule import learning_rate
from minidist.train.step import Engine, StepResult


@dataclass
class Progress:
    """Where a run is: steps taken and samples consumed. With the configuration it determines everything to come."""

    step: int = 0
    position: int = 0


def train(world: World, config: Config) -> dict:
    """Train as the configuration says, on this rank; every rank calls it. Returns the summary of the run.

    Raises UserError for what cannot run, RunError when the run fails.
    """
    with StopRequest() as stop:
        trainer = Trainer(world, config)
        try:
            return trainer.run(stop)
        finally:
            trainer.reporter.close()


class Trainer:
    """One rank of a run. The constructor builds and, if asked, resumes; `run` trains."""

    def __init__(self, world: World, config: Config):
        self.world, self.config = world, config
        self.mesh = check(config, world.size)
        self.corpus = open_corpus(config.data.source, config.data.path, config.data.seq_len)
        if self.corpus.vocab_size > config.model.vocab_size:
            raise UserError(
                f"the corpus has {self.corpus.vocab_size} different tokens, the model {config.model.vocab_size}: "
                f"give --model.vocab-size {self.corpus.vocab_size} or more."
            )
        self.groups = comm.bind(world, self.mesh, USES, meter=Meter(keep=False), timeout_s=config.comm.timeout_s)
        self.control = self.groups["control"]
        self.swap = comm.exchange(self.control)
        self._check_same_corpus()
        self.folder = self._choose_folder()
        model = Transformer(config.model)
        init_parameters(model, config.train.seed)
        self.engine = Engine(
            parallelize(model.to(world.device), self.groups, config), self.groups, config.optim, config.train.seed
        )
        data, train = config.data, config.train
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation(self.corpus.held_out, data.seq_len, train.eval_samples)
        self.progress = Progress()
        if config.checkpoint.resume is not None:
            self._resume()
        self.reporter = make_reporter(world, config, self.mesh, self.corpus.describe(), self.folder)
        # Rank 0 writes for all.
        self.metrics = runfolder.Metrics(self.folder, config, self.progress.step) if world.rank == 0 else None
        if self.metrics:
            self.metrics.write({"step": self.progress.step, "corpus": self.corpus.fingerprint, "ranks": world.size})

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, stop: StopRequest) -> dict:
        """Train to the last step, or to the step after which any rank was asked to stop. Returns the summary."""
        train, stopped = self.config.train, False
        saved = self.progress.step if self.config.checkpoint.resume else -1
        while self.progress.step < train.steps and not stopped:
            result = self._step(stop.requested is not None)
            stopped, step, last = result.stop, self.progress.step, self.progress.step == train.steps
            if train.eval_every and step % train.eval_every == 0 and not last and not stopped:
                self._evaluate()
            if _due(step, self.config.checkpoint.every) or last or stopped:
                self._save()
                saved = step
        if saved < 0:
            self._save()
        if stopped:
            self.reporter.note(f"stopped after step {self.progress.step}; go on with --checkpoint.resume {self.folder}")
        return self._finish(stopped)

    def _step(self, stop: bool) -> StepResult:
        config, step = self.config, self.progress.step
        start, sent = time.perf_counter(), self.groups.meter.total_wire_bytes
        at = self.mesh.coords(self.world.rank)["dp"]
        data, train = config.data, config.train
        batches = self.loader.micro_batches(
            self.progress.position, train.global_batch, at, self.mesh.dp, train.micro_batches, data.shares
        )
        lr = learning_rate(config.optim, step, train.steps)
        weight = data.weights[at] if data.weights else 1.0
        result = self.engine.step(step, batches, lr, weight=weight, stop=stop)
        if not result.finite:
            self._give_up(result)
        self.progress = Progress(step + 1, self.progress.position + train.global_batch)
        elapsed = time.perf_counter() - start
        self.reporter.step(self.progress.step, result)
        if _due(self.progress.step, train.log_every) or self.progress.step in (1, train.steps):
            self._log(result, lr, elapsed, self.groups.meter.total_wire_bytes - sent)
        return result

    def _log(self, result: StepResult, lr: float, step_time_s: float, sent: int) -> None:
        mine = {"step_time_s": step_time_s, "comm_bytes": sent, "memory": metrics.peak_memory(self.world.device)}
        lanes = self.swap(mine)
        step_time_s = max(lane["step_time_s"] for lane in lanes)
        row = {
            "step": self.progress.step,
            "tokens": self.progress.position * self.config.data.seq_len,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "step_time_s": step_time_s,
            "tokens_per_s": result.tokens / step_time_s,
            "comm_bytes": max(lane["comm_bytes"] for lane in lanes),
            "memory": max(lane["memory"] for lane in lanes),
        }
        if peak := metrics.peak_flops(self.world.device, torch.float32):
            flops = self.config.model.flops_per_token(self.config.data.seq_len)
            row["mfu"] = metrics.mfu(flops, row["tokens_per_s"], self.world.size, peak)
            row["mfu_formula"] = metrics.MFU_FORMULA
        self.reporter.log(row, lanes)
        if self.metrics:
            self.metrics.write(row)

    def _evaluate(self) -> float:
        at = self.mesh.coords(self.world.rank)["dp"]
        samples = self.held_out.num_samples
        parts = -(-samples // self.config.train.global_batch)
        loss = self.engine.evaluate(self.held_out.micro_batches(0, samples, at, self.mesh.dp, parts))
        self.reporter.held_out(self.progress.step, loss)
        if self.metrics:
            self.metrics.write({"step": self.progress.step, "held_out_loss": loss})
        return loss

    def _finish(self, stopped: bool) -> dict:
        summary = {"step": self.progress.step, "stopped": stopped, "folder": str(self.folder)}
        if stopped:
            return summary
        summary["held_out_loss"] = self._evaluate()
        if self.world.rank == 0:
            summary |= baselines(self.corpus)
            self.reporter.baselines(summary["held_out_loss"], summary["unigram"], summary["bigram"], self.corpus)
            lines = {name: summary[name] for name in ("unigram", "bigram")}
            if self.corpus.entropy_rate is not None:
                lines["entropy rate"] = self.corpus.entropy_rate
            runfolder.draw_loss(self.metrics.rows, lines, self.folder / "loss.png")
            if self.config.train.sample_tokens:
                prompt = bytes(self.corpus.held_out[: min(48, self.corpus.held_out.size)].tolist())
                self.reporter.text(*continue_text(self.engine.model, prompt, self.config))
            self.reporter.note(f"run folder: {self.folder}")
        comm.barrier(self.control)  # rank 0 may still be serving the others' store
        return summary

    def _give_up(self, result: StepResult) -> None:
        """End the run on all ranks: a number is not finite, and nothing was updated."""
        found = folders.complete(self.folder / runfolder.CHECKPOINTS)
        last = f"The last checkpoint is {found[max(found)]}." if found else "There is no checkpoint yet."
        names = [name for name in self.swap(result.not_finite) if name is not None]
        own = [rank for rank, finite in enumerate(self.swap(result.own_loss_finite)) if not finite]
        where = f"the loss of rank {', '.join(map(str, own))}" if own else "the reduced gradient"
        raise RunError(
            f"step {self.progress.step + 1}: {where} is not finite; the first tensor that is not: "
            f"{names[0] if names else 'none'}. No parameter was updated. {last} "
            "Lower --optim.lr, or clip with --optim.clip-norm."
        )

    # -- what survives ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        root = self.folder / runfolder.CHECKPOINTS
        kept = {
            "config": to_toml(self.config),
            "step": self.progress.step,
            "position": self.progress.position,
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.describe(),
        }
        path = checkpoint.save(root, self.progress.step, state.pieces(self.engine), kept, self.swap, self.control.rank)
        if self.world.rank == 0:
            folders.prune(root, self.config.checkpoint.keep, path)
            self.reporter.note(f"checkpoint: {path}")

    def _resume(self) -> None:
        path = folders.latest(runfolder.checkpoints_of(self.config.checkpoint.resume))
        index = checkpoint.read_index(path)
        kept = index.state
        if kept.get("corpus") != self.corpus.fingerprint:
            raise UserError(
                f"{path} was trained on another corpus: {kept.get('corpus_name')}; this run has "
                f"{self.corpus.describe()}. Give the same --data.source or --data.path, or start a new run."
            )
        before = from_text(kept["config"], str(path))
        for name, was, now in (
            ("train.seed", before.train.seed, self.config.train.seed),
            ("data.seq-len", before.data.seq_len, self.config.data.seq_len),
        ):
            if was != now:
                raise UserError(
                    f"{path} was trained with --{name} {was}, this run has {now}: its data order would be another. "
                    f"Give --{name} {was}, or start a new run."
                )
        if kept["step"] >= self.config.train.steps:
            raise UserError(
                f"{path} is at step {kept['step']} and the run ends at --train.steps {self.config.train.steps}: "
                f"there is nothing left to do. Give more steps."
            )
        state.prepare(self.engine, index)
        checkpoint.load(path, state.pieces(self.engine), self.swap, self.control.rank)
        self.progress = Progress(kept["step"], kept["position"])

    def _check_same_corpus(self) -> None:
        found = self.swap((self.corpus.fingerprint, self.corpus.describe()))
        other = next((rank for rank, (fingerprint, _) in enumerate(found) if fingerprint != found[0][0]), None)
        if other is not None:
            raise UserError(
                f"the ranks read different texts: rank 0 {found[0][1]}; rank {other} {found[other][1]}. "
                "Give all of them the same --data.path (the standard library differs between Python versions)."
            )

    def _choose_folder(self) -> Path:
        """Rank 0 looks, all ranks use what it found (or raise what it raised)."""
        found = None
        if self.world.rank == 0:
            try:
                found = ("folder", str(runfolder.choose(self.config)))
            except UserError as error:
                found = ("error", str(error))
        kind, text = self.swap(found)[0]
        if kind == "error":
            raise UserError(text)
        return Path(text)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def resumed_config(config: Config) -> Config:
    """The configuration stored in the checkpoint that `config` resumes from, to lay new options over."""
    path = folders.latest(runfolder.checkpoints_of(config.checkpoint.resume))
    stored = from_text(checkpoint.read_index(path).state["config"], str(path))
    return dataclasses.replace(
        stored, folder=None, checkpoint=dataclasses.replace(stored.checkpoint, resume=config.checkpoint.resume)
    )
