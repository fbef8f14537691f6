"""Forward and backward of a step's micro-batches through what this rank holds of the model.

Without a pipeline micro-batches go through one after the other and their gradients accumulate. With one, the executor
decides which micro-batch goes through which part when. Either way each loss sum is divided by the one count of the
step, and by nothing else.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minidist.comm import Groups, all_gather, broadcast
from minidist.data.loader import Batch
from minidist.models.dropout import DropoutAddress
from minidist.parallel.context.chunks import DEFAULT_LAYOUT
from minidist.parallel.context.layout import cut, positions
from minidist.parallel.context.split import whole_sequences
from minidist.parallel.data.reducer import collect
from minidist.parallelize import Parallel
from minidist.parameters import named_parameters
from minidist.train.loss import Count, backward


class Passes:
    """Runs the model of a `Parallel`. seed: of dropout.

    counts_loss: whether this rank's losses count; ranks of a tensor group compute the same, and stages before the last
    part none.
    """

    def __init__(self, parallel: Parallel, groups: Groups, seed: int):
        self.model, self.pipeline, self.groups, self.seed = parallel.model, parallel.pipeline, groups, seed
        self.updates, self.scaler = parallel.updates, parallel.scaler
        self.device, self._parallel = groups.world.device, parallel
        self._at, self._mesh = groups.mesh.coords(groups.world.rank), groups.mesh
        self._last_micro_batch = False
        self._where: dict[int, Tensor] = {}  # of the last sequence length
        parameters = named_parameters(self.model)
        if self.pipeline is None:
            self._hooks = collect(parameters, parallel.sink, self._is_last)
        else:  # which knows when a gradient is complete
            self._hooks = collect(parameters, self.pipeline, lambda: True)
        has_end = self.pipeline is None or self.pipeline.stage == self.pipeline.end_stage
        self.counts_loss = has_end and self._at["tp"] == 0

    # -- training -----------------------------------------------------------------------------------------------------

    def own(self, batches: Sequence[Batch]) -> list[Batch]:
        """What this rank sees of each batch: its positions of every sequence. Their labels were shifted before."""
        if self._mesh.cp == 1:
            return list(batches)
        return [Batch(*cut(b.tokens, b.labels, self._positions(b.tokens.shape[1])), b.samples) for b in batches]

    def _positions(self, seq_len: int) -> Tensor:
        """Of this rank's tokens in a whole sequence, (seq_len / cp,) int64."""
        if seq_len not in self._where:
            layout = DEFAULT_LAYOUT[self._parallel.context]
            self._where = {seq_len: positions(layout, seq_len, self._mesh.cp, self._at["cp"]).to(self.device)}
        return self._where[seq_len]

    def train(self, step: int, batches: Sequence[Batch], weight: float, count: Count) -> float | Tensor:
        """Forward and backward; returns this rank's part of the loss, () in nats. batches: those of `own`."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        if self.pipeline is None:
            return backward((loss_sum * scale for loss_sum in self.loss_sums(step, batches)), weight, count) / scale
        if count.value == 0:
            return 0.0
        shares: list[Tensor] = []
        given = [self._addressed(step, batch) for batch in batches]

        def part(chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
            out = self._part(chunk, *given[micro_batch], hidden)
            if isinstance(out, Tensor):
                return out
            share = out[0] * weight / count.value
            shares.append(share.detach())
            return share * scale

        empty = [i for i, batch in enumerate(batches) if self._skips(batch)]
        self.pipeline.run(part, lambda micro_batch: self._hidden(batches[micro_batch].tokens), empty)
        return torch.stack(shares).sum() if shares else 0.0

    def loss_sums(self, step: int, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """The forward of one micro-batch after the other: the sum of the losses of its tokens."""
        for i, batch in enumerate(batches):
            self._last_micro_batch = i == len(batches) - 1
            if not self._skips(batch):
                batch, address = self._addressed(step, batch)
                with self.groups.meter.span("forward", micro_batch=i):
                    loss_sum = self.model(batch.tokens, batch.labels, address=address, positions=address.positions)[0]
                with self.groups.meter.span("backward", micro_batch=i):  # which is what the caller does with it
                    yield loss_sum
            self.updates.end()

    def _is_last(self) -> bool:
        """Whether a gradient of the backward that runs is complete: so that nothing adds to it before it is reduced."""
        return self.updates.each_micro_batch or self._last_micro_batch

    def _skips(self, batch: Batch) -> bool:
        """Nothing is computed for no samples; but where a pass gathers parameters, all ranks go through it."""
        return len(batch.samples) == 0 and self.updates.blocks is None

    def _addressed(self, step: int, batch: Batch) -> tuple[Batch, DropoutAddress]:
        batch = batch.to(self.device)
        where = self._positions(batch.tokens.shape[1] * self._mesh.cp)
        return batch, DropoutAddress(self.seed, step, batch.samples, where)

    # -- through stages -----------------------------------------------------------------------------------------------

    def _part(self, chunk: int, batch: Batch, address: DropoutAddress, hidden: Tensor | None) -> Tensor | tuple:
        """One part of the model: hidden states, or of the last part the loss sum and the count."""
        how = {"address": address, "positions": address.positions, "layers": self._layers(chunk), "hidden": hidden}
        return self.model(batch.tokens, batch.labels, **how)

    def _layers(self, chunk: int) -> range:
        return self._parallel.parts[self.pipeline.schedule.position(self.pipeline.stage, chunk)]

    def _hidden(self, tokens: Tensor) -> Tensor:
        """An empty tensor of the shape that the hidden states of these tokens (b, s) have between two stages."""
        samples, seq_len = tokens.shape
        if self._parallel.sequence:
            seq_len //= self._mesh.tp
        like = next(self.model.parameters())
        return torch.empty(samples, seq_len, self.model.config.hidden_size, dtype=like.dtype, device=self.device)

    # -- without gradients --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """The loss sum, in nats, and the number of tokens that count, as far as they count on this rank."""
        found = [torch.zeros(2, dtype=torch.float64, device=self.device)]
        given = [
            self._addressed(0, batch) for batch in self.own(batches) if not self._skips(batch)
        ]  # nothing is dropped

        def see(loss_sum: Tensor, count: Tensor) -> Tensor:
            found.append(torch.stack([loss_sum.double(), count.double()]))
            return loss_sum

        def part(chunk: int, i: int, hidden: Tensor | None) -> Tensor:
            out = self._part(chunk, *given[i], hidden)
            return out if isinstance(out, Tensor) else see(*out)

        if self.pipeline is not None:
            self.pipeline.evaluate(part, lambda i: self._hidden(given[i][0].tokens), len(given))
        else:
            for batch, address in given:
                see(*self.model(batch.tokens, batch.labels, positions=address.positions))
        return torch.stack(found).sum(0).tolist() if self.counts_loss else [0.0, 0.0]

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """(b, s) int64 -> (b, vocab), of the token that follows. All ranks call it with the same, and get the same.

        Ranks of a cp group all go through the whole sequence, which grows by one token at a time.
        """
        samples, seq_len = tokens.shape
        missing = -seq_len % self._mesh.tp if self._parallel.sequence else 0  # no token sees those that come after it
        padded = torch.cat((tokens, tokens.new_zeros(samples, missing)), 1)
        ends: list[Tensor] = []

        def part(chunk: int, _: int, hidden: Tensor | None) -> Tensor:
            layers = self._layers(chunk)
            out = self.model(padded, layers=layers, hidden=hidden)
            if layers.stop == self.model.config.num_layers:
                ends.append(out)
            return out

        with whole_sequences(self.model):
            if self.pipeline is not None:
                self.pipeline.evaluate(part, lambda _: self._hidden(padded), 1)
            else:
                ends.append(self.model(padded))
        like = next(self.model.parameters())
        logits = like.new_empty(samples, self.model.config.vocab_size)
        if ends:
            mine = ends[0][:, seq_len - 1].T.contiguous()  # (vocab / tp, b)
            if self._mesh.tp > 1:
                columns = mine.new_empty(self.model.config.vocab_size, samples)
                all_gather(columns, mine, self.groups["tensor"])
                mine = columns
            logits.copy_(mine.T)
        if self.pipeline is not None:
            broadcast(logits, self.pipeline.end_stage, self.groups["activations"])
        return logits
