"""A run: data, steps, log lines, evaluation and checkpoints, the same on one rank and on many.

    from minidist.simple.trainer import train
    train(world, config)     # on every rank

`Trainer.run` reads like a single-process training loop: all that is parallel is in the engine, in what `load` and
`save` exchange, and in the sample numbers that the loader is asked for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidist.comm import Meter, World, all_gather_object, bind
from minidist.config import Config, to_toml
from minidist.data.corpus import open_corpus
from minidist.data.loader import Loader, evaluation_loader
from minidist.errors import DamagedError, RunError, UserError
from minidist.learning_rate import learning_rate
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import Box
from minidist.simple import checkpoint
from minidist.simple.checkpoint import Shard
from minidist.simple.engine import Engine
from minidist.simple.mixed_precision import Decision
from minidist.simple.parallelize import group_specs, parallelize


@dataclass(frozen=True)
class Progress:
    """How far a run is: number of completed steps, and of samples that they have consumed."""

    step: int = 0
    consumed_samples: int = 0


class Trainer:
    """One rank of a run. The constructor builds everything and resumes, if the run's folder has a checkpoint.

    log: called on rank 0 with a line of text. is_stop_requested: whether this rank asks for the end of the run, as
    after a signal; all ranks stop after the same step. Raises UserError on all ranks if the run is impossible.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        log: Callable[[str], None] = print,
        is_stop_requested: Callable[[], bool] = lambda: False,
    ):
        self.world, self.config = world, config
        self.is_stop_requested = is_stop_requested
        self.log = log if world.rank == 0 else lambda line: None
        self.mesh = config.mesh_of(world.size)
        self.groups = bind(world, self.mesh, group_specs(self.mesh, config), meter=Meter(keep=False))
        self.control = self.groups["control"]
        data, train = config.data, config.train
        self.corpus = checkpoint.on_all_ranks(lambda: open_corpus(data.source, data.path, data.seq_len), self.control)[
            world.rank
        ]
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation_loader(self.corpus.held_out, data.seq_len, train.eval_samples)
        model = Transformer(config.model)
        init_parameters(model, train.seed)
        self.engine = Engine(parallelize(model.to(world.device), self.groups, config), self.groups, config)
        self.progress = Progress()
        self.checkpoints = Path(config.folder) / "checkpoints"
        self.resume()

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Collective: train to the last step, or until a rank asks for the end; return a summary of the run."""
        train, every = self.config.train, self.config.checkpoint.every
        stopped = False
        while self.progress.step < train.steps and not stopped:
            begin_s = time.perf_counter()
            decision = self.step()
            step, stopped = self.progress.step, decision.stop
            if step % train.log_every == 0 or step in (1, train.steps):
                self.log(format_step(step, decision, time.perf_counter() - begin_s))
            if train.eval_every and step % train.eval_every == 0 and step < train.steps and not stopped:
                self.evaluate()
            if (every and step % every == 0) or step == train.steps or stopped:
                self.save()
        summary = {"step": self.progress.step, "stopped": stopped, "folder": str(self.config.folder)}
        if not stopped:
            summary["held_out_loss"] = self.evaluate()
        return summary

    def step(self) -> Decision:
        """Collective: train on the next global batch. Raises RunError if the loss or a gradient is not finite."""
        config, step = self.config, self.progress.step
        data, train = config.data, config.train
        dp_rank = self.mesh.coords(self.world.rank)["dp"]
        batches = self.loader.micro_batches(
            self.progress.consumed_samples, train.global_batch, dp_rank, self.mesh.dp, train.micro_batches, data.shares
        )
        weight = data.weights[dp_rank] if data.weights else 1.0
        lr = learning_rate(config.optim, step, train.steps)
        decision = self.engine.step(step, batches, lr, weight, self.is_stop_requested())
        scaler = self.engine.scaler
        if not decision.is_finite and (not decision.overflowed or scaler.exhausted):
            raise RunError(f"step {step + 1}: the loss or a gradient is not finite: lower --optim.lr")
        self.progress = Progress(step + 1, self.progress.consumed_samples + train.global_batch)
        return decision

    def evaluate(self) -> float:
        """Collective: return the mean loss of the held-out samples, in nats per token."""
        dp_rank = self.mesh.coords(self.world.rank)["dp"]
        num_samples = self.held_out.num_samples
        per_micro_batch = max(1, self.config.train.global_batch // self.config.train.micro_batches)
        num_batches = -(-num_samples // per_micro_batch)
        loss = self.engine.evaluate(self.held_out.micro_batches(0, num_samples, dp_rank, self.mesh.dp, num_batches))
        self.log(f"step {self.progress.step}: held-out loss {loss:.4f}")
        return loss

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Return this rank's shards of the whole training state: masters and optimizer states."""
        rank, engine = self.world.rank, self.engine
        shards = []
        for name, master in engine.reducer.masters.items():
            spec = engine.parallel.master_specs[name]
            shards += checkpoint.make_shards("params", spec, master, rank)
            for key, value in engine.optimizer.state[master].items():
                if value.dim():
                    shards += checkpoint.make_shards(f"optimizer.{key}", spec, value, rank)
                else:  # AdamW's number of steps: saved by the rank with the parameter's first element
                    has_first = not any(spec.boxes[0].start)
                    is_saved_here = has_first and spec.owner == rank
                    shards.append(Shard(f"optimizer.{key}/{name}", (), Box((), ()), value, is_saved_here))
        return shards

    def save(self) -> None:
        """Collective: save all that decides how the run goes on, and delete old checkpoints."""
        scaler = self.engine.scaler
        state = {
            "config": to_toml(self.config),
            "step": self.progress.step,
            "position": self.progress.consumed_samples,
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.describe(),
            "replicas": 1,
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }
        path = checkpoint.save(self.checkpoints, self.progress.step, self.shards(), state, self.control)
        if self.world.rank == 0:
            checkpoint.prune(self.checkpoints, self.config.checkpoint.keep)
        self.log(f"checkpoint: {path}")

    def resume(self) -> None:
        """Collective: load the newest intact checkpoint of the run's folder, if there is one."""
        # Rank 0's list: another rank may see a checkpoint a moment later.
        for path in reversed(all_gather_object(checkpoint.complete_checkpoints(self.checkpoints), self.control)[0]):
            try:
                self.load(path)
                self.log(f"resumed from {path}")
                return
            except DamagedError as error:
                self.log(f"{error}; trying the checkpoint before it")

    def load(self, path: Path) -> None:
        """Collective: continue from a checkpoint that any layout, and either engine, has saved."""
        index = checkpoint.on_all_ranks(lambda: checkpoint.read_index(path), self.control)[self.world.rank]
        if index["state"]["corpus"] != self.corpus.fingerprint:
            raise UserError(
                f"{path} was trained on another corpus ({index['state']['corpus_name']}) than this run has "
                f"({self.corpus.describe()}): give the same --data.source or --data.path, or another --folder"
            )
        self.create_optimizer_states(index["tensors"])
        state = checkpoint.load(path, self.shards(), self.control)["state"]
        self.engine.reducer.update_parameters()
        if self.engine.scaler is not None and state["loss_scaler"]:
            self.engine.scaler.load_state_dict(state["loss_scaler"])
        self.progress = Progress(state["step"], state["position"])

    def create_optimizer_states(self, tensors: dict[str, dict]) -> None:
        """Create the optimizer states that a checkpoint has, which the optimizer would create in its first step."""
        for name, master in self.engine.reducer.masters.items():
            for stored, entry in tensors.items():
                kind, _, parameter = stored.partition("/")
                if parameter == name and kind.startswith("optimizer."):
                    shape = master.shape if entry["shape"] else ()
                    value = torch.zeros(shape, dtype=getattr(torch, entry["dtype"]), device=master.device)
                    self.engine.optimizer.state[master][kind.removeprefix("optimizer.")] = value


def train(world: World, config: Config, **options: Any) -> dict[str, Any]:
    """Collective: train as `config` says; return the summary of the run. options: as `Trainer`."""
    return Trainer(world, config, **options).run()


def format_step(step: int, decision: Decision, step_time_s: float) -> str:
    """Return the log line of a step."""
    if decision.overflowed:
        return f"step {step}: gradients overflowed; the step was skipped, and the loss scale halved"
    loss = "no token counts" if decision.loss is None else f"loss {decision.loss:.4f}"
    return f"step {step}: {loss}, gradient norm {decision.grad_norm:.3f}, {1e3 * step_time_s:.0f} ms"
