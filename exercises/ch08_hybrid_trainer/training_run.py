"""A run that can be stopped and resumed.

Write the run around the training step: data, learning rate, a stop on which all ranks agree, digests, evaluations and
checkpoints. A run that was stopped and resumed must take the same steps as a run that was not.

The constructor is given. It resumes from the newest checkpoint and sets self.progress, Progress(step,
consumed_samples): the number of completed steps, and of the samples that they have consumed. You write five methods.

step: takes step number progress.step (from 0) of train.steps on the next train.global_batch samples, with its learning
rate and with the weight of this rank's data shard in data.weights, or 1 if that is None. If the decision is not finite,
raises RunError and leaves progress as it was. There is one exception: after an overflow the run goes on, unless
scaler.overflows_persist, after too many consecutive ones. Every step after which the run goes on counts, with its
samples, also if all ranks have skipped the update.

run: repeats `step` until train.steps are completed or a stop is agreed. After each step, in this order:
    notify("on_step", self, decision)
    agree_on_stop
    compare_replicas   every fault.digest_every steps and before every save; never if digest_every is 0
    evaluate           every train.eval_every steps, but neither after the last step nor at a stop
    save               every checkpoint.every steps, after the last step, and at a stop
An interval of 0 removes "every so many steps" only: also with checkpoint.every 0 a run saves after the last step and
at a stop. After the loop, with any eval_every: notify("on_last_step", self); evaluate, unless a stop came before the
last step; notify("on_end", self, summary). The summary is the result: {"step": completed steps, "stopped": whether the
run ended before the last step, "folder": str(self.folder)}, with "held_out_loss" if there was this last evaluation.

agree_on_stop: returns whether any rank asks for the end of the run, the same on all ranks. If replicas train separately
(self.engine.merger is not None), `decision` has the requests of one replica only. The run then goes on while
merger.num_different_models is above 1; when it is 1, all ranks gather self.is_stop_requested() from one another.

evaluate: returns the mean loss of all held-out samples, each of them once. A micro-batch of training has, of all data
shards together, n = max(1, global_batch // micro_batches) samples; here a data shard has at most n / mesh.dp of them in
a micro-batch, rounded up. Then notify("on_evaluation", progress.step,
loss, number of models): merger.num_different_models, or 1 without a merger.

save: saves a checkpoint. Then rank 0 deletes old ones; if that fails, all ranks raise. Then notify("on_checkpoint",
path).

Example: train.steps 7, checkpoint.every 3, digest_every 2, eval_every 3. Digests are compared after steps 2, 3, 4, 6
and 7, evaluations are after 3 and 6 and once at the end, checkpoints after 3, 6 and 7. If rank 1 asks for the end in
step 5, digests and a checkpoint follow step 5 on all ranks, and {"step": 5, "stopped": True, ...} is returned.

Checked: losses and held-out loss of a run against one process in float64, on 1, 2 and 4 ranks, with shares and weights,
7 samples per step and another learning rate in each; the held-out loss and the sizes of micro-batches on 1 and 3 ranks,
for numbers of samples that do not divide; events, comparisons, saves, deletions and the summary of four schedules, in
order; a request to stop of one rank only, in the middle and in the last step; runs that are stopped, or killed between
two saves, and resumed, bit by bit, with fp16 and ZeRO; the samples of a run that goes on with more ranks and another
batch size; which checkpoints are left; a step without tokens, an overflow, too many overflows, a loss of NaN; a failed
deletion; and local SGD, which stops at merges only.

You may call:
    self.loader.micro_batches(position, size, dp_rank, dp_size, micro_batches, shares) -> list   of this data shard;
        also self.held_out.micro_batches(...), without shares; self.held_out.num_samples; config.data.shares
    self.mesh.coords(self.world.rank)["dp"]   this rank's data shard; learning_rate(config.optim, step, steps) -> float
    self.engine.step(step, batches, lr, weight, stop_requested) -> Decision, self.engine.evaluate(batches) -> loss
    decision.is_finite, .overflowed, .stop_requested; self.engine.scaler   None without loss scaling
    self.is_stop_requested()   whether this rank asks for the end; self.control   the group of all ranks
    all_gather_object(value, group) -> list   collective; self.notify(event, *args), self.compare_replicas()
    checkpoint.save(root, step, shards, state, group) -> path   collective; root: self.folder / "checkpoints"
    state_shards(self.engine), json_state(self)   the shards and the state; checkpoint.on_all_ranks(action, group)
    checkpoint.prune(path, config.checkpoint.keep)   keeps the newest checkpoints up to `path`, deletes the others

Check it with: python -m exercises check training_run

Stub a5be44f3.
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
        raise NotImplementedError("run to the last step or a stop, with digests, evaluations, saves; return a summary")

    def step(self) -> Decision:
        """Collective: train on the next global batch. Raises RunError if its loss or a gradient is not finite.

        All ranks that train together raise it; replicas that train separately decide each for itself.
        """
        begin_s = time.perf_counter()
        raise NotImplementedError("take the next step, and count it")
        self.step_time_s = time.perf_counter() - begin_s
        return decision

    def agree_on_stop(self, decision: Decision) -> bool:
        """Collective: return whether any rank asks for the end. Replicas that train separately meet in merges only."""
        raise NotImplementedError("return whether any rank asks for the end")

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
        raise NotImplementedError("return the mean loss of the held-out samples")

    def save(self) -> None:
        """Collective: save all that decides how the run goes on, and delete old checkpoints."""
        raise NotImplementedError("save a checkpoint, and delete old ones")
