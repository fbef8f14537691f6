"""One step of any layout: the solution, as it stands in minidist.simple.engine.

All layouts have one step because each question is asked once, over the ranks that share the answer. The count is
summed over the ranks with different tokens, before the first backward, so each loss is divided by it and the
gradients need no correction afterwards. The sum of gradients is the reducer's. Loss and norm are summed over all
ranks, so every rank contributes its part such that nothing is counted twice: the loss by one rank of those that
compute it, each gradient element by all that have it, divided by their number.

The decision comes before the first write. Up to then a step can be forgotten, afterwards it cannot: if one rank skips
an update that the others make, its replica differs for ever. So everything that is decided, an overflow, a step
without tokens, a request to stop, is taken from one all-reduce, and no rank looks at its own values again. The scaler
changes in the agreement, which is why the sums are divided before it.

Reduce, update, gather: this order is the same for plain data parallelism, where gather is a copy or nothing, and for
ZeRO, where it moves the parameters. Whatever has changed the masters, an update or a merge, is followed by it.

Usual wrong answers:
* scales small gradients up to clip_norm
* has the dropout masks of step 0 in every step
* the package's own
* clips by this rank's part of the norm
* runs forward and backward although no token counts
* reports the loss 3 for every batch
* counts before context parallelism cuts the sequences: every token counts once per rank
* divides by the number of micro-batches, too
* divides by the number of data-parallel ranks, as if nothing was sharded or replicated otherwise
* divides by a count of 0
* stays in evaluation mode after an evaluation: no dropout
* skips the update only where this rank sees the fault
* adds each step's gradients to those of the last
* divides by a scale that nothing was multiplied by
* adds up the equal losses of the tensor-parallel ranks
* divides by this rank's own count: the loss is a mean of means
* leaves the parameters of a replica that has skipped its update as they were
* a replica that skips a step does not come to the merge
* ends each micro-batch before its backward: with ZeRO stage 2 a block with an unused parameter is not reduced after
  the last one
* does not tell the reducer of the end of a micro-batch
* does not clip
* never merges replicas
* squares the gradients in their own dtype: finite ones above 2e19 have an infinite square
* a rank without tokens of its own does not update
* tells the merger the tokens of this rank, not of its replica
* leaves the parameters as they are: ZeRO's other shards are old
* never sets the learning rate
* reduces before the tied gradient is complete: its sum is in no reduction
* counts replicated elements once for each rank that has them
* divides ZeRO's shards by the number of ranks with the parameter
* tells the others nothing of a request to stop
* returns at once if no token counts: a request to stop in this step is lost, and the merger does not hear of the step
* does not gather ZeRO's root
* leaves the loss scale in the gradients
* removes the scale after the decision, which has changed it
* reports the scaled loss
* gives a replica weight for an update that was skipped
* leaves out the sum of the tied gradient over both stages
* expects a gradient of every parameter
* updates, and then learns that no rank should have
* weights the count and not the loss
* weights the loss and not the count
* decides and changes nothing
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
        self.model.train()
        self.reducer.clear()
        micro_batches = [self.take_tokens(batch) for batch in micro_batches]

        num_tokens = count_tokens([batch.num_loss_tokens for batch in micro_batches], weight, self.groups["grads"])
        loss = self.forward_backward(step, micro_batches, weight, num_tokens) if num_tokens else 0.0
        self.reducer.finish()
        self.scale_gradients(1.0 if self.scaler is None else 1.0 / self.scaler.scale)
        decision = agree_on_step(loss, self.squared_norm(), stop_requested, num_tokens, self.scaler, self.control)
        if decision.update_successful:
            self.clip_and_step_optimizer(decision.grad_norm, lr)
        is_merged = False
        if self.merger is not None:
            is_merged = self.merger.after_step(step, num_tokens if decision.update_successful else 0.0)
        if decision.update_successful or is_merged:
            self.reducer.update_parameters()
        return decision

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
        scale = 1.0 if self.scaler is None else self.scaler.scale
        losses = [torch.zeros((), dtype=torch.float64, device=self.groups.world.device)]

        def run_stage(index: int, hidden: Tensor | None) -> Tensor:
            out = self.run_layers(batches[index], step, hidden)
            if isinstance(out, Tensor):
                return out
            loss = out[0] * weight / num_tokens
            losses.append(loss.detach().double())
            return loss * scale

        self.reducer.gather_root()
        if self.parallel.pipeline is not None:
            self.parallel.pipeline.run(
                run_stage,
                lambda index: self.empty_hidden(batches[index]),
                self.find_empty(batches),
                self.reducer.end_micro_batch,
            )
        else:
            for index in range(len(batches)):
                if index not in self.find_empty(batches):
                    run_stage(index, None).backward()
                    self.reducer.end_micro_batch()
        if self.parallel.tied is not None:
            self.parallel.tied.finish()
        return float(torch.stack(losses).sum()) if self.is_loss_counted else 0.0

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
        total = 0.0
        for name, master in self.reducer.masters.items():
            if master.grad is not None:
                num_replicas = len(self.parallel.master_specs[name].replicas)
                total += master.grad.double().square().sum().item() / num_replicas
        return total

    def clip_and_step_optimizer(self, grad_norm: float, lr: float) -> None:
        """Scale the gradients down to the largest norm allowed, and run the optimizer on the masters."""
        clip_norm = self.config.optim.clip_norm
        if clip_norm is not None:
            self.scale_gradients(min(1.0, clip_norm / (grad_norm + 1e-6)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

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
