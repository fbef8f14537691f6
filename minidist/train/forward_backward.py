"""Forward and backward of a step's micro-batches through this rank's part of the model.

Without a pipeline, micro-batches run one after another and their gradients accumulate. With one, the executor decides
which micro-batch runs through which chunk when. Either way each loss sum is divided by the step's one token count, and
by nothing else.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from minidist.comm import Groups
from minidist.data.loader import Batch
from minidist.models.dropout import DropoutAddress
from minidist.parallel.context.chunks import DEFAULT_LAYOUT
from minidist.parallel.context.layout import rank_positions, shard_sequence
from minidist.parallel.data.reducer import register_gradient_hooks
from minidist.parallelize import ParallelModel
from minidist.parameters import named_parameters
from minidist.train.loss import AsyncSum, backward


class ForwardBackward:
    """Runs forward and backward of micro-batches through this rank's part of the model.

    parallel: the model as `parallelize` returned it. groups: the process groups. seed: the seed of dropout.
    is_loss_counted: whether the losses of this rank enter the sum over all ranks. Ranks of a tensor-parallel group
    compute the same loss, which only the first of them counts; of the pipeline stages, only the one that has the last
    part of the model computes a loss.
    """

    def __init__(self, parallel: ParallelModel, groups: Groups, seed: int):
        self.model = parallel.model
        self.pipeline = parallel.pipeline
        self.reducer = parallel.reducer
        self.groups = groups
        self.seed = seed
        self.scaler = parallel.scaler
        self.device = groups.world.device
        self._parallel = parallel
        self._at = groups.mesh.coords(groups.world.rank)
        self._mesh = groups.mesh
        self._last_micro_batch = False
        self._positions_of: dict[int, Tensor] = {}  # of the last sequence length
        for name, parameter in named_parameters(self.model).items():
            # Which backward completes a gradient depends, in a pipeline, on the chunks that use the parameter.
            executor = self.pipeline
            is_last = self._gradients_are_ready if executor is None else partial(executor.is_last_backward, name)
            register_gradient_hooks({name: parameter}, self.reducer, is_last)
        has_end = self.pipeline is None or self.pipeline.stage == self.pipeline.last_part_stage
        self.is_loss_counted = has_end and self._at["tp"] == 0

    # -- training -----------------------------------------------------------------------------------------------------

    def shard_sequences(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches with only this rank's positions of each sequence (context parallelism).

        The labels of a batch are already shifted. Without context parallelism, the batches are returned unchanged.
        """
        if self._mesh.cp == 1:
            return list(batches)
        return [
            Batch(*shard_sequence(b.tokens, b.labels, self._positions(b.tokens.shape[1])), b.samples) for b in batches
        ]

    def _positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank's tokens in a full sequence, (seq_len / cp,) int64."""
        if seq_len not in self._positions_of:
            layout = DEFAULT_LAYOUT[self._parallel.cp_attention]
            self._positions_of = {
                seq_len: rank_positions(layout, seq_len, self._mesh.cp, self._at["cp"]).to(self.device)
            }
        return self._positions_of[seq_len]

    def run_micro_batches(self, step: int, batches: Sequence[Batch], weight: float, count: AsyncSum) -> float | Tensor:
        """Run forward and backward of every micro-batch; return this rank's part of the loss, () in nats.

        step: the number of the step, which determines the dropout masks. batches: the micro-batches, as
        `shard_sequences` returned them. weight: the weight of this rank's data in the loss. count: the token count of
        the global batch, by which the loss is divided.
        """
        if self.pipeline is not None:
            return self._train_pipeline(step, batches, weight, count)
        loss = 0.0
        scale = 1.0 if self.scaler is None else self.scaler.scale
        for i, batch in enumerate(batches):
            self._last_micro_batch = i == len(batches) - 1
            if not self._is_skipped(batch):
                with self.groups.meter.span("forward", micro_batch=i):
                    loss_sum = self.forward_loss(step, batch)
                with self.groups.meter.span("backward", micro_batch=i):
                    loss = loss + backward([loss_sum * scale], weight, count)
            self.reducer.finish_micro_batch()
        return loss / scale

    def forward_loss(self, step: int, batch: Batch) -> Tensor:
        """Run forward of a micro-batch and return the sum of its token losses, () in nats. Not for a pipeline."""
        batch, address = self._to_device_with_address(step, batch)
        return self.model(batch.tokens, batch.labels, address=address, positions=address.positions)[0]

    def _gradients_are_ready(self) -> bool:
        """Whether the running backward is the last before gradients are reduced."""
        return self.reducer.reduces_each_micro_batch or self._last_micro_batch

    def _is_skipped(self, batch: Batch) -> bool:
        """Whether to skip a batch: it has no samples, and the forward gathers no parameters, which needs all ranks."""
        return len(batch.samples) == 0 and self.reducer.gatherer is None

    def _to_device_with_address(self, step: int, batch: Batch) -> tuple[Batch, DropoutAddress]:
        """Return the batch on this rank's device, and the address of its dropout masks in step `step`."""
        batch = batch.to(self.device)
        where = self._positions(batch.tokens.shape[1] * self._mesh.cp)
        return batch, DropoutAddress(self.seed, step, batch.samples, where)

    # -- with a pipeline ----------------------------------------------------------------------------------------------

    def _train_pipeline(self, step: int, batches: Sequence[Batch], weight: float, count: AsyncSum) -> float | Tensor:
        """Run all micro-batches through the pipeline. Arguments and result as in `run_micro_batches`."""
        if count.value == 0:
            return 0.0
        scale = 1.0 if self.scaler is None else self.scaler.scale
        losses: list[Tensor] = []
        addressed = [self._to_device_with_address(step, batch) for batch in batches]

        def part(chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
            out = self._run_chunk(chunk, *addressed[micro_batch], hidden)
            if isinstance(out, Tensor):
                return out
            loss = out[0] * weight / count.value
            losses.append(loss.detach())
            return loss * scale

        empty = [i for i, batch in enumerate(batches) if self._is_skipped(batch)]
        self.pipeline.run(part, lambda micro_batch: self._empty_hidden(batches[micro_batch]), empty)
        return torch.stack(losses).sum() if losses else 0.0

    def _run_chunk(self, chunk: int, batch: Batch, address: DropoutAddress, hidden: Tensor | None) -> Tensor | tuple:
        """Run one chunk of this stage: return hidden states; after the last layer the loss sum and token count."""
        layers = self._parallel.layer_range(chunk)
        return self.model(
            batch.tokens, batch.labels, address=address, positions=address.positions, layers=layers, hidden=hidden
        )

    def _empty_hidden(self, batch: Batch) -> Tensor:
        """Allocate a tensor for the hidden states of a micro-batch, received from another stage."""
        return self._parallel.empty_hidden(*batch.tokens.shape, self._mesh.tp)

    # -- without gradients --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sum_losses_and_tokens(self, batches: Sequence[Batch]) -> list[float]:
        """Return [sum of the token losses in nats, number of these tokens] of this rank, without gradients.

        batches: this rank's, with full sequences. Returns [0.0, 0.0] unless `is_loss_counted`.
        """
        sums = [torch.zeros(2, dtype=torch.float64, device=self.device)]
        addressed = [
            self._to_device_with_address(0, batch)
            for batch in self.shard_sequences(batches)
            if not self._is_skipped(batch)
        ]

        def record(loss_sum: Tensor, count: Tensor) -> Tensor:
            sums.append(torch.stack([loss_sum.double(), count.double()]))
            return loss_sum

        def part(chunk: int, i: int, hidden: Tensor | None) -> Tensor:
            out = self._run_chunk(chunk, *addressed[i], hidden)
            return out if isinstance(out, Tensor) else record(*out)

        if self.pipeline is not None:
            self.pipeline.run_forward(part, lambda i: self._empty_hidden(addressed[i][0]), len(addressed))
        else:
            for batch, address in addressed:
                record(*self.model(batch.tokens, batch.labels, positions=address.positions))
        return torch.stack(sums).sum(0).tolist() if self.is_loss_counted else [0.0, 0.0]
