"""One step of any layout.

Write the training step: count, forward and backward, reduce, agree, update, gather. On every layout it must give the
numbers of one process, and no rank may change a parameter before all ranks have decided that all of them do.

The constructor, the evaluation and some helpers are given. You write four methods.

step: micro_batches has full sequences of this rank's data shard; take_tokens returns this rank's tokens of them, which
you count and compute with. If no token of the global batch counts, there is no forward and backward, and whether
reducer.finish() runs is up to you. Returns the Decision, equal on all ranks of self.control. If replicas train
separately, self.merger is not None: after every step it gets the step's number and the tokens of this replica, weighted
as in the loss, or 0 if the replica's update was skipped. Whenever masters have changed, the parameters follow.

forward_backward: returns this rank's part of the loss; the parts of all ranks add up to the mean loss per token. With
loss scaling (self.scaler is not None) backward starts from the loss times scaler.scale, and `step` divides the sums by
the same scale. self.parallel.pipeline and self.parallel.tied are None on a layout without them. It does not call
self.reducer.finish(): `step` does, after it.

squared_norm: returns this rank's part of the squared norm of the global gradient. All ranks in
self.parallel.master_specs[name].replicas have the same elements of the master `name`, and the parts of all ranks
together count each element once. self.reducer.masters is {name: master}, with the gradient in master.grad.

clip_and_step_optimizer: if config.optim.clip_norm is not None and grad_norm is larger, multiplies all gradients by
clip_norm / (grad_norm + 1e-6); then runs the optimizer with the learning rate lr.

Example: two data-parallel ranks of weight 1 have 3 and 1 tokens, with loss sums 6.0 and 4.0. The count is 4, the parts
of the loss are 1.5 and 1.0, and the loss is 2.5. The mean of the two means would be 3.0. If the summed gradient of the
only parameter is [3, 4], each rank's squared_norm is 12.5, and the norm is 5. With clip_norm 1 the optimizer gets about
[0.6, 0.8].

Checked: loss, count, gradients, norm and parameters of two or three steps on 1, 2 and 4 ranks, against one process in
float64: data shards with different samples and weights, one of them without samples; each mesh axis by itself and two
at a time, tied embeddings over two stages, ZeRO 1 to 3, recomputation; dropout, also after an evaluation; norms above
and below clip_norm, and None; another learning rate in each step; a parameter that no rank uses. A step in which no
token counts on any rank: loss None, nothing changes, and the next step is right. Infinity in the gradients of one rank
or NaN in its loss: no rank changes masters, parameters or optimizer states, and the next step is right. fp16: the loss
scale is removed by the value that it had in backward, also if it doubles or halves in this step, and the parameters
are the rounded masters. One rank's request to stop is in every rank's Decision. Replicas that train separately: the
calls of the merger, and parameters that are the rounded merged masters, also if an update was skipped.

You may call:
    count_tokens(numbers, weight, group) -> float   collective; groups["grads"]; batch.num_loss_tokens   of one batch
    agree_on_step(loss, squared_norm, stop_requested, num_tokens, scaler, group) -> Decision   collective: exercise 6.3
    decision.update_successful   whether all ranks update; decision.grad_norm   of the global gradient
    self.run_layers(batch, step, hidden) -> hidden states, or after the last layer (sum of token losses, their number);
        hidden: those of the previous stage, None on the first one
    self.take_tokens(batch) -> Batch, self.empty_hidden(batch) -> Tensor, self.scale_gradients(factor)   of all masters
    self.is_loss_counted   whether this rank, of those that compute the same loss, is the one that reports it
    self.find_empty(batches) -> set   indices of micro-batches without samples, which this data shard's ranks may skip
    self.model.train()   training mode; master.grad   the summed gradient, None if no rank has used the parameter
    self.reducer.clear(), .gather_root(), .end_micro_batch(), .finish(), .update_parameters()   chapters 01 and 05:
        before a step, before its first forward, after each micro-batch's backward, after the last one, after the update
    self.parallel.pipeline.run(run_stage, empty_hidden, skip, on_backward_done)   run_stage(index, hidden) returns
        hidden states, or the loss to run backward from; empty_hidden(index) -> Tensor; on_backward_done()   after each
    self.parallel.tied.finish()   after the last backward; self.merger.after_step(step, num_tokens) -> bool: it merged
    self.optimizer.param_groups   dicts with the key "lr"; self.optimizer.step(); Tensor.square(), Tensor.double()

Check it with: python -m exercises check training_step

Stub 6be16ed5.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm import Groups, all_reduce
from minidist.config import Config
from minidist.data.loader import Batch
from minidist.models.dropout import DropoutAddress
from minidist.simple.consistency import ReplicaMerger
from minidist.simple.context_parallel import rank_positions
from minidist.simple.data_parallel import count_tokens
from minidist.simple.engine import make_optimizer
from minidist.simple.mixed_precision import Decision, agree_on_step
from minidist.simple.parallelize import ParallelModel


class Engine:
    """Runs training steps and evaluations of a model that `parallelize` has laid out over the ranks.

    groups: bound from `group_specs`. control: the ranks that train together and decide together. merger: of replicas
    that train separately; None if all ranks train together.
    """

    def __init__(self, parallel: ParallelModel, groups: Groups, config: Config):
        self.parallel, self.groups, self.config = parallel, groups, config
        self.model, self.reducer, self.scaler = parallel.model, parallel.reducer, parallel.scaler
        self.merger: ReplicaMerger | None = None
        if config.num_replicas(groups.mesh) > 1:
            self.merger = ReplicaMerger(config.consistency, self.reducer.masters, groups["outer"], config.train.steps)
        self.control = groups["replica"] if "replica" in groups else groups["control"]
        self.optimizer = make_optimizer(config, self.reducer.masters, parallel.master_specs)
        self.positions: dict[int, Tensor] = {}
        coords = groups.mesh.coords(groups.world.rank)
        # The ranks of a tensor-parallel group compute the same loss, and only the last stage computes any.
        self.is_loss_counted = coords["tp"] == 0 and coords["pp"] == groups.mesh.pp - 1

    def step(
        self, step: int, micro_batches: Sequence[Batch], lr: float, weight: float = 1.0, stop_requested: bool = False
    ) -> Decision:
        """Collective: train on this rank's part of a global batch; return what all ranks have decided.

        step: its number, from 0. micro_batches: this rank's, of full sequences. lr: the learning rate. weight: each
        token of this rank counts so often in the mean loss. stop_requested: whether this rank asks for the end of the
        run. After an exception the engine cannot be used any more.
        """
        expected = self.config.train.micro_batches
        if len(micro_batches) != expected:
            raise ValueError(f"there are {len(micro_batches)} micro-batches, and train.micro_batches is {expected}")
        raise NotImplementedError("count, forward and backward, reduce, agree, update, gather")

    # -- forward and backward -----------------------------------------------------------------------------------------

    def take_tokens(self, batch: Batch) -> Batch:
        """Return this rank's tokens of each sequence, and their labels, which were shifted before the split."""
        positions = self.rank_positions(batch.tokens.shape[1])
        return Batch(batch.tokens[:, positions], batch.labels[:, positions], batch.samples)

    def rank_positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank's tokens in sequences of `seq_len` tokens, on the CPU."""
        mesh = self.groups.mesh
        cp_rank = mesh.coords(self.groups.world.rank)["cp"]
        return rank_positions(seq_len, mesh.cp, cp_rank, zigzag=self.config.parallel.context == "ring")

    def forward_backward(self, step: int, batches: Sequence[Batch], weight: float, num_tokens: float) -> float:
        """Collective: run all micro-batches; return this rank's part of the global batch's mean loss, in nats.

        Each loss sum is divided by the number of tokens of the global batch before its backward, and by nothing later.
        """
        raise NotImplementedError("run all micro-batches, and return this rank's part of the mean loss")

    def find_empty(self, batches: Sequence[Batch]) -> set[int]:
        """Return the indices of the micro-batches without samples; none if ZeRO needs all ranks in each of them."""
        if self.config.zero.stage >= 2:
            return set()
        return {index for index, batch in enumerate(batches) if len(batch.samples) == 0}

    def run_layers(self, batch: Batch, step: int, hidden: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Run this stage's layers; return hidden states, or after the last layer the loss sum and number of tokens."""
        mesh, world = self.groups.mesh, self.groups.world
        batch = batch.to(world.device)
        positions = self.device_positions(batch.tokens.shape[1] * mesh.cp)
        dropped = positions  # of the hidden states: with sequence parallelism this rank's, of its tp group's tokens
        if self.config.parallel.sequence:
            dropped = positions.chunk(mesh.tp)[mesh.coords(world.rank)["tp"]]
        address = DropoutAddress(self.config.train.seed, step, batch.samples, dropped)
        return self.model(
            batch.tokens,
            batch.labels,
            address=address,
            positions=positions,
            layers=self.parallel.layers,
            hidden=hidden,
        )

    def device_positions(self, seq_len: int) -> Tensor:
        """Return `rank_positions` on this rank's device, always the same tensor, for which RoPE's tables are cached."""
        if seq_len not in self.positions:
            self.positions[seq_len] = self.rank_positions(seq_len).to(self.groups.world.device)
        return self.positions[seq_len]

    def empty_hidden(self, batch: Batch) -> Tensor:
        """Allocate hidden states for a micro-batch, (b, s / cp, h); with sequence parallelism (b, s / cp / tp, h)."""
        samples, seq_len = batch.tokens.shape
        if self.config.parallel.sequence:
            seq_len //= self.groups.mesh.tp
        like = next(iter(self.model.parameters()))
        return like.new_empty(samples, seq_len, self.config.model.hidden_size).detach()

    # -- norm and update ----------------------------------------------------------------------------------------------

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        if factor != 1.0:
            for master in self.reducer.masters.values():
                if master.grad is not None:
                    master.grad.mul_(factor)

    def squared_norm(self) -> float:
        """Return this rank's part of the squared norm of the global gradient.

        Several ranks may have the same elements of a parameter, so each counts its fraction of them.
        """
        raise NotImplementedError("return this rank's part of the squared norm of the global gradient")

    def clip_and_step_optimizer(self, grad_norm: float, lr: float) -> None:
        """Scale the gradients down to the largest norm allowed, and run the optimizer on the masters."""
        raise NotImplementedError("clip the gradients by the global norm, and run the optimizer")

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Collective: return the mean token loss of all ranks' batches, in nats; NaN without any token."""
        self.model.eval()
        batches = [self.take_tokens(batch) for batch in batches]
        sums = torch.zeros(2, dtype=torch.float64, device=self.groups.world.device)

        def run_stage(index: int, hidden: Tensor | None) -> Tensor:
            out = self.run_layers(batches[index], 0, hidden)
            if isinstance(out, Tensor):
                return out
            loss_sum, count = out
            if self.is_loss_counted:
                sums.add_(torch.stack((loss_sum.double(), count.double())))
            return loss_sum

        self.reducer.gather_root()
        if self.parallel.pipeline is not None:
            self.parallel.pipeline.run_forward(run_stage, lambda index: self.empty_hidden(batches[index]), len(batches))
        else:
            for index in range(len(batches)):
                run_stage(index, None)
        self.reducer.free_root()
        all_reduce(sums, self.groups["control"])
        loss_sum, count = sums.tolist()
        return loss_sum / count if count else math.nan
