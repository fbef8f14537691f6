"""Forward and backward of a step's micro-batches through what this rank holds of the model.

Without a pipeline micro-batches go through one after the other and their gradients accumulate. With one, the executor
decides which micro-batch goes through which part when. Either way each loss sum is divided by the one count of the
step, and by nothing else.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minidist.comm import Groups
from minidist.data.loader import Batch
from minidist.models.dropout import DropoutAddress
from minidist.parallel.context.layout import NATURAL, cut, positions
from minidist.parallel.grads import collect
from minidist.parallelize import Parallel
from minidist.spec import named_parameters
from minidist.train.loss import Count, backward


class Passes:
    """Runs the model of a `Parallel`. seed: of dropout."""

    def __init__(self, parallel: Parallel, groups: Groups, seed: int):
        self.model, self.pipeline, self.groups, self.seed = parallel.model, parallel.pipeline, groups, seed
        self._parallel = parallel
        self.device, mesh = groups.world.device, groups.mesh
        self._last_micro_batch = False
        parameters = named_parameters(self.model)
        if self.pipeline is None:
            self._hooks = collect(parameters, parallel.sink, lambda: self._last_micro_batch)
        else:  # which knows when a gradient is complete
            self._hooks = collect(parameters, self.pipeline, lambda: True)
        self.has_end = self.pipeline is None or self.pipeline.has_end
        # Ranks of a tensor group compute the same loss: one of them counts.
        self.counts_loss = self.has_end and mesh.coords(groups.world.rank)["tp"] == 0

    def own(self, batches: Sequence[Batch]) -> list[Batch]:
        """What this rank sees of each batch: its positions of every sequence. Their labels were shifted before."""
        if self.groups.mesh.cp == 1:
            return list(batches)
        return [Batch(*cut(b.tokens, b.labels, self._positions(b.tokens.shape[1])), b.samples) for b in batches]

    def _positions(self, seq_len: int) -> Tensor:
        """Of this rank's tokens in a sequence of `seq_len`, (seq_len / cp,) int64."""
        mesh, at = self.groups.mesh, self.groups.mesh.coords(self.groups.world.rank)
        return positions(NATURAL[self._parallel.context], seq_len, mesh.cp, at["cp"]).to(self.device)

    def train(self, step: int, batches: Sequence[Batch], weight: float, count: Count) -> float | Tensor:
        """Forward and backward; returns this rank's part of the loss, () in nats. batches: those of `own`."""
        if self.pipeline is None:
            return backward(self.loss_sums(step, batches), weight, count)
        return self._through_stages(step, batches, weight, count)

    def loss_sums(self, step: int, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """The forward of one micro-batch after the other: the sum of the losses of its tokens."""
        for i, batch in enumerate(batches):
            self._last_micro_batch = i == len(batches) - 1
            if len(batch.samples) == 0:
                continue
            batch, address = self._addressed(step, batch)
            with self.groups.meter.span("forward", micro_batch=i):
                loss_sum = self.model(batch.tokens, batch.labels, address=address, positions=address.positions)[0]
            with self.groups.meter.span("backward", micro_batch=i):  # which is what the caller does with it
                yield loss_sum

    def _addressed(self, step: int, batch: Batch) -> tuple[Batch, DropoutAddress]:
        batch = batch.to(self.device)
        where = self._positions(batch.tokens.shape[1] * self.groups.mesh.cp)
        return batch, DropoutAddress(self.seed, step, batch.samples, where)

    def _through_stages(self, step: int, batches: Sequence[Batch], weight: float, count: Count) -> float | Tensor:
        if count.value == 0:
            return 0.0
        loss, given = 0.0, [self._addressed(step, batch) for batch in batches]

        def part(chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
            nonlocal loss
            batch, address = given[micro_batch]
            out = self._part(chunk, batch, hidden, address)
            if isinstance(out, Tensor):
                return out
            share = out[0] * weight / count.value
            loss = loss + share.detach()
            return share

        empty = [i for i, batch in enumerate(batches) if len(batch.samples) == 0]
        self.pipeline.run(part, lambda micro_batch: self._hidden(batches[micro_batch]), empty)
        return loss

    def _part(self, chunk: int, batch: Batch, hidden: Tensor | None, address: DropoutAddress | None):
        """One part of the model: hidden states, or of the last part the loss sum and the count."""
        layers = self._parallel.parts[self.pipeline.schedule.position(self.pipeline.stage, chunk)]
        where = self._positions(batch.tokens.shape[1] * self.groups.mesh.cp) if address is None else address.positions
        return self.model(batch.tokens, batch.labels, address=address, positions=where, layers=layers, hidden=hidden)

    def _hidden(self, batch: Batch) -> Tensor:
        """An empty tensor of the shape that hidden states have between two stages."""
        samples, seq_len = batch.tokens.shape
        if self._parallel.sequence:
            seq_len //= self.groups.mesh.tp
        like = next(self.model.parameters())
        return torch.empty(samples, seq_len, self.model.config.hidden_size, dtype=like.dtype, device=self.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """The loss sum, in nats, and the number of tokens that count, as far as they count on this rank."""
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = [batch.to(self.device) for batch in self.own(batches) if len(batch.samples)]

        def part(chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
            nonlocal found
            out = self._part(chunk, batches[micro_batch], hidden, None)
            if isinstance(out, Tensor):
                return out
            found = found + torch.stack([number.double() for number in out])
            return out[0]

        if self.pipeline is not None:
            self.pipeline.evaluate(part, lambda micro_batch: self._hidden(batches[micro_batch]), len(batches))
        else:
            for batch in batches:
                where = self._positions(batch.tokens.shape[1] * self.groups.mesh.cp)
                out = self.model(batch.tokens, batch.labels, positions=where)
                found = found + torch.stack([number.double() for number in out])
        return found.tolist() if self.counts_loss else [0.0, 0.0]
