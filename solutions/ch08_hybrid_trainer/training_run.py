"""A run that can be stopped and resumed: the solution, as it stands in minidist.simple.trainer.

A run is a loop, and all that is parallel in it is that every rank does the same at the same step. Evaluations,
digests and checkpoints are collective, so whether they take place may depend only on what all ranks know: the
configuration, the number of the step, and the decision of all ranks. A rank's own signal is none of these. It travels
in the step's own all-reduce, which costs nothing, and comes back to every rank in the same decision.

Digests are compared before a save, because a checkpoint of a damaged replica is worse than none: it is the state to
which the next failure returns. Checkpoints follow the count, so a resumed run begins with the next step, its samples,
its learning rate and its dropout masks, which all are functions of the progress.

The held-out loss is a sum over all samples, divided by the number of all tokens: a mean of the ranks' means would
depend on the layout. Replicas that train separately do not meet between merges, so a stop has to wait for one.

Usual wrong answers:
* asks for a stop before the observers have seen the step: their request is heard at the next merge
* calls separate replicas one model
* stops replicas between merges: the checkpoint has models that differ
* the package's own
* has the same samples in every step
* counts the step that fails
* looks at the number of the step before it was counted
* compares digests before a save even if digest_every is 0
* numbers the steps from 1: other dropout masks
* gives on_end its arguments in the other order
* never ends a run whose gradients always overflow
* evaluates once more while the machine waits for its end
* tells the observers of a checkpoint before the old ones are deleted
* deletes old checkpoints on all ranks at once
* goes on with a loss of NaN
* evaluates after the last step twice
* scales the loss by this rank's share of the samples
* never deletes a checkpoint
* ignores a request to stop
* compares digests every digest_every steps only
* leaves out on_last_step
* saves no state of the loss scaler
* saves the parameters without the optimizer states
* saves nothing at a stop: the steps since the last checkpoint are lost
* saves nothing after the last step
* evaluates all samples in one batch
* gives every rank all samples: right, but in micro-batches that are too large
* takes a step before it looks: a run that is complete goes beyond its last step
* ends the run at the first overflow
* ends where this rank asks: the others wait for it
* counts this rank's samples only
* computes the position from the number of steps: another batch size repeats or skips samples
* rank 0 raises alone, and the others wait for it
* takes the rank for the number of its data shard, whose weight it looks up
* takes the learning rate of the next step
* leaves out the samples that do not fill a micro-batch
* replicas stop between merges, each for itself
* does not send this rank's request
* gathers the requests from before the step: one that comes during it has to wait for the next merge
* saves the number of the next step
* compares digests after the save: a damaged replica is in the checkpoint
* saves where no run looks for checkpoints
* takes every = 0 for every step
* divides the samples evenly
* takes a step that was skipped again, with the same samples
* calls a run stopped that has done all its steps
* takes the list of the answers for the answer: a list is true
* gives on_evaluation the number of samples instead of the loss
* reports the number of data shards as the number of models
* divides by the number of data shards without weights: right losses, and a wrong count of tokens
* gives all data the weight 1
* runs no steps
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.comm import Meter, World, all_gather_object, bind
from minidist.config import Config, to_toml
from minidist.data.corpus import open_corpus
from minidist.data.loader import Loader, evaluation_loader
from minidist.errors import RunError, UserError, format_ranks
from minidist.learning_rate import learning_rate
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.simple import checkpoint
from minidist.simple.engine import Engine
from minidist.simple.mixed_precision import Decision
from minidist.simple.parallelize import group_specs, parallelize
from minidist.simple.recovery import differing_replicas, recover, replicated_tensors
from minidist.simple.training_state import Progress, json_state, resume, state_shards


class Trainer:
    """One rank of a run. The constructor builds everything and resumes, if the run's folder has a checkpoint.

    observers: objects with some of the methods of `LogLines`, `on_last_step(trainer)` and `on_end(trainer, summary)`;
    each is called on every rank. meter: counts the bytes that this rank sends. Raises UserError on all ranks if the run
    is impossible.
    """

    def __init__(self, world: World, config: Config, observers: Sequence[Any] = (), meter: Meter | None = None):
        self.world, self.config, self.observers = world, config, tuple(observers)
        self.mesh = config.mesh_of(world.size)
        self.groups = bind(world, self.mesh, group_specs(self.mesh, config), meter=meter or Meter(keep=False))
        self.control = self.groups["control"]
        fingerprints = checkpoint.on_all_ranks(self.open_corpus, self.control)
        if len(set(fingerprints)) > 1:
            raise UserError("the ranks read different texts: give all of them the same --data.path.")
        self.folder, checkpoints = self.open_folder()
        self.config_text = to_toml(config)  # saved in checkpoints
        model = Transformer(config.model)
        init_parameters(model, config.train.seed)
        self.engine = Engine(parallelize(model.to(world.device), self.groups, config), self.groups, config)
        self.progress, self.step_time_s = Progress(), 0.0
        self.resumed_from = resume(self, checkpoints)

    def open_corpus(self) -> str:
        """Open the text and its loaders; return its fingerprint. Raises UserError if the model has too few tokens."""
        data, train, vocab_size = self.config.data, self.config.train, self.config.model.vocab_size
        self.corpus = open_corpus(data.source, data.path, data.seq_len)
        if self.corpus.vocab_size > vocab_size:
            raise UserError(
                f"the corpus has {self.corpus.vocab_size} different tokens, the model {vocab_size}: "
                f"give --model.vocab-size {self.corpus.vocab_size} or more."
            )
        self.loader = Loader(self.corpus.train, data.seq_len, train.seed, min_length=data.min_length)
        self.held_out = evaluation_loader(self.corpus.held_out, data.seq_len, train.eval_samples)
        return self.corpus.fingerprint

    def open_folder(self) -> tuple[Path, list[Path]]:
        """Collective: return the run's folder, and the checkpoints to try to resume from, in this order."""
        if self.config.folder is None:
            raise UserError("a run of the simple trainer needs a folder: give --folder.")
        folder = Path(self.config.folder).expanduser()
        found = checkpoint.on_all_ranks(lambda: checkpoint.complete_checkpoints(folder / "checkpoints"), self.control)
        return folder, found[0][::-1]  # rank 0's list: another rank may see one a moment later

    def notify(self, event: str, *args: Any) -> None:
        """Call the method `event` of all observers that have it."""
        for observer in self.observers:
            if hasattr(observer, event):
                getattr(observer, event)(*args)

    def is_stop_requested(self) -> bool:
        """Return whether this rank asks for the end of the run. A hook for subclasses: here it never does."""
        return False

    def check_resume(self, path: Path) -> None:
        """Collective: raise UserError if the run may not go on from `path`. A hook: here every checkpoint will do."""

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Collective: train to the last step, or until a rank asks for the end; return a summary of the run."""
        train, every, digest_every = self.config.train, self.config.checkpoint.every, self.config.fault.digest_every
        is_stopped = False
        while self.progress.step < train.steps and not is_stopped:
            decision = self.step()
            step, is_last = self.progress.step, self.progress.step == train.steps
            self.notify("on_step", self, decision)
            is_stopped = self.agree_on_stop(decision)
            must_save = (every and step % every == 0) or is_last or is_stopped
            if digest_every and (step % digest_every == 0 or must_save):
                self.compare_replicas()
            if train.eval_every and step % train.eval_every == 0 and not is_last and not is_stopped:
                self.evaluate()
            if must_save:
                self.save()
        self.notify("on_last_step", self)
        is_stopped = is_stopped and self.progress.step < train.steps
        summary = {"step": self.progress.step, "stopped": is_stopped, "folder": str(self.folder)}
        if not is_stopped:
            summary["held_out_loss"] = self.evaluate()
        self.notify("on_end", self, summary)
        return summary

    def step(self) -> Decision:
        """Collective: train on the next global batch. Raises RunError if its loss or a gradient is not finite.

        All ranks that train together raise it; replicas that train separately decide each for itself.
        """
        begin_s = time.perf_counter()
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
        if not decision.is_finite and (not decision.overflowed or scaler.overflows_persist):
            raise RunError(f"step {step + 1}: the loss or a gradient is not finite. Lower --optim.lr.")
        self.progress = Progress(step + 1, self.progress.consumed_samples + train.global_batch)
        self.step_time_s = time.perf_counter() - begin_s
        return decision

    def agree_on_stop(self, decision: Decision) -> bool:
        """Collective: return whether any rank asks for the end. Replicas that train separately meet in merges only."""
        merger = self.engine.merger
        if merger is None:
            return decision.stop_requested
        if merger.num_different_models > 1:
            return False
        return any(all_gather_object(self.is_stop_requested(), self.control))

    def compare_replicas(self) -> None:
        """Collective: compare the bits of all replicas; repair those that differ, if told to, else raise RunError."""
        found = differing_replicas(replicated_tensors(self), self.engine.control)
        if not found:
            return
        ranks, name = set().union(*found.values()), next(iter(found))
        what = f"step {self.progress.step}: the replicas of {name} differ, on {format_ranks(found[name])}."
        if not self.config.fault.repair:
            raise RunError(f"{what} Go on from the last checkpoint, or repair replicas with --fault.repair.")
        recover(self, None if self.world.rank in ranks else self)
        self.notify("on_note", f"{what} Repaired from the others.")

    def evaluate(self) -> float:
        """Collective: return the mean loss of the held-out samples, in nats per token."""
        dp_rank, merger = self.mesh.coords(self.world.rank)["dp"], self.engine.merger
        num_samples = self.held_out.num_samples
        per_micro_batch = max(1, self.config.train.global_batch // self.config.train.micro_batches)
        num_batches = -(-num_samples // per_micro_batch)
        loss = self.engine.evaluate(self.held_out.micro_batches(0, num_samples, dp_rank, self.mesh.dp, num_batches))
        self.notify("on_evaluation", self.progress.step, loss, 1 if merger is None else merger.num_different_models)
        return loss

    def save(self) -> None:
        """Collective: save all that decides how the run goes on, and delete old checkpoints."""
        root = self.folder / "checkpoints"
        path = checkpoint.save(root, self.progress.step, state_shards(self.engine), json_state(self), self.control)

        def prune() -> None:
            if self.world.rank == 0:
                checkpoint.prune(path, self.config.checkpoint.keep)

        checkpoint.on_all_ranks(prune, self.control)
        self.notify("on_checkpoint", path)
