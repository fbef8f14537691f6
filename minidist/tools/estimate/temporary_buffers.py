"""Rows of parameters and gradients that ZeRO has for a while only, and the gradients there are, at a place in a step.

In stage 3 a layer's parameters are gathered while it computes, and those of the next while this one does; what comes
last in forward stays. In stages 2 and 3 gradients wait as they come until those of a row are there; the row lives while
it is reduced, at most two being on their way, one when another is made; and with it the shard that stays.
"""

from collections.abc import Sequence, Set

from minidist.precision.policy import BYTES
from minidist.process_groups import is_hidden_matrix
from minidist.tools.estimate import shards, states
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.shards import Row
from minidist.zero.grouping import REST

# Places beside the layers, which are numbers: head and last norm, the embedding, and when the backward is over.
END, FIRST, OVER = "end", "first", "over"
ON_THEIR_WAY = 2  # rows of gradients


class Passing:
    """On the ranks of a stage. rows: those in which parameters lie, in the order of backward; gradients: bytes of those
    that stay; many: whether a step has several micro-batches."""

    def __init__(self, layout: Layout, stage: int, rows: Sequence[Row], gradients: int, many: bool):
        self.layout, self.stage, self.rows, self.all, self.many = layout, stage, rows, gradients, many
        self.zero, self.policy = layout.config.zero, layout.policy
        self.full, self.wire = BYTES[self.policy.accumulate], BYTES[self.policy.reduce]
        self._weights = {weight.name: weight for weight in states.weights(layout, stage)}

    # -- parameters ---------------------------------------------------------------------------------------------------

    def gathered(self, chunk: int, at: int | str, forward: bool = False, ahead: bool = True) -> int:
        """Bytes of the rows of parameters that are there. ahead: whether the next one is under way."""
        if self.zero.stage < 3:
            return 0
        part = self.layout.chunks(self.stage)[chunk]
        last = part.layers[-1:] if self.zero.prefetch or self.zero.keep_last_block else ()
        if forward:
            last = last if part.last and self.zero.keep_last_block else ()
        blocks = {END: last, FIRST: part.layers[:1], OVER: part.layers[:1]}.get(at)
        if blocks is None:
            blocks = [i for i in (at, at - (self.zero.prefetch and ahead)) if i in part.layers]
        root = [REST] if part.first or part.last else []
        return (
            sum(row.layout.numel for row in self.rows if row.block in {*blocks, *root}) * BYTES[self.policy.parameter]
        )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def before(self) -> int:
        """Bytes of the gradients that are there before a backward, the last of a step if it has many."""
        return 0 if self._made_in_backward and not self.many else self.all

    def at(self, chunk: int, at: int | str, come: int, later: bool = False) -> tuple[int, int]:
        """Bytes of gradients, and of those that wait and of rows on their way, when so many of a piece have come.
        later: those of matrices come when backward is over."""
        here = self._come(chunk, at, come)
        if later:
            here = {name for name in here if self._weights[name].dimensions < 2 or name == states.FIRST[0][0]}
        if not shards.apart(self.layout):
            made = sum(self._weights[name].numel for name in here) * self.full
            return (made if self._made_in_backward and not self.many else self.all), 0
        launched = self.launched(chunk, at, come)
        if not self.zero.shares_gradients:
            sent = [self._sent(row) for row in launched if self.zero.stage]
            return self.all, sum(sent) if self.wire != self.full else 0
        return self._shards(launched), self._waiting(here, launched) + self._sending(chunk, launched, ON_THEIR_WAY)

    def making(self, chunk: int, number: int, at: int | str, come: int) -> tuple[int, int]:
        """The same while a row is made of its gradients, and then sent. number: of it, among those of the part."""
        before = self._rows(chunk)[:number]
        row, here = self._rows(chunk)[number], self._come(chunk, at, come)
        whole, shard = row.layout.numel * self.full, row.layout.shard * self.full
        waiting, of_it = self._waiting(here, [*before, row]), self._waiting(here & row.layout.slots.keys(), [])
        copies = self._sent(row) if self.wire != self.full else 0
        passing = whole + waiting + max(of_it, shard * self.many + copies)
        return self._shards(before), passing + self._sending(chunk, before, ON_THEIR_WAY - 1)

    def _rows(self, chunk: int) -> list[Row]:
        return [row for row in self.rows if row.chunk == chunk]

    def _shards(self, launched: Sequence[Row]) -> int:
        return self.all if self.many else sum(row.layout.shard for row in launched) * self.full

    def _waiting(self, here: Set[str], launched: Sequence[Row]) -> int:
        """Bytes of gradients that have come, as they came."""
        names = here.difference(*(row.layout.slots for row in launched))
        return sum(self._weights[name].numel for name in names) * BYTES[self.policy.parameter]

    def _sending(self, chunk: int, launched: Sequence[Row], most: int) -> int:
        """Bytes of the rows that are on their way, so many at most, and of their shards. Of one rank alone none is."""
        if self.layout.config.zero.shard_group_size(self.layout.mesh) == 1:
            return 0
        earlier = self._rows(chunk) if self.many else []  # of the micro-batch before
        rows = [*earlier, *launched][-most:]
        return sum(self._sent(row) + self.many * row.layout.shard * self.full for row in rows)

    @property
    def _made_in_backward(self) -> bool:
        if shards.apart(self.layout):
            return self.zero.shares_gradients
        return self.layout.config.comm.gradients == "naive"

    def _come(self, chunk: int, at: int | str, come: int) -> set[str]:
        """The parameters of a part of the model whose gradients have come."""
        part = self.layout.chunks(self.stage)[chunk]
        if at == OVER:
            return {name for row in self._rows(chunk) for name in row.layout.slots}
        here = [name for name, _, _ in reversed(states.LAST) if name in self._weights] if part.last else []
        if at == END:
            return set(here[:come])
        for index in reversed(part.layers):
            names = [f"model.layers.{index}.{name}" for name, _, _ in reversed(states.LAYER)]
            if index == at:
                return {*here, *names[:come]}
            here += names
        return {*here, *([states.FIRST[0][0]] if come and part.first else [])}

    def launched(self, chunk: int, at: int | str, come: int) -> list[Row]:
        """The rows whose reduction has begun: all of their gradients have come, or in stage 3, the layer is through."""
        mine, here = self._rows(chunk), self._come(chunk, at, come)
        if at == OVER:
            return mine
        if self.layout.mesh.pp > 1 and self.zero.shares_gradients:
            return []  # at the end of the part
        if self.zero.stage == 3:
            through = {END: len(self._weights), FIRST: self.layout.chunks(self.stage)[chunk].layers[0]}.get(at, at)
            return [row for row in mine if row.block > through]
        found = []
        for row in mine:
            if not row.layout.slots.keys() <= here:
                break
            found.append(row)
        return found

    def _sent(self, row: Row) -> int:
        """Bytes of a row that is reduced: itself, or copies of it and of its result in the format of the wire. A rank
        that shares with nobody sends nothing, and has it no longer."""
        whole = row.layout.numel if self.layout.config.zero.shard_group_size(self.layout.mesh) > 1 else 0
        if self.wire == self.full:
            return whole * self.full
        return (whole + row.layout.shard) * self.wire

    # -- after backward -----------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Bytes of copies on their way when backward is over."""
        sent = self.zero.stage > 0 and self.wire != self.full and not self.zero.shares_gradients
        return sum(map(self._sent, self.rows)) * sent

    def update(self) -> int:
        """Bytes that the update takes beside what stays: of one row after another, where gradients or masters are there
        only meanwhile, and of a matrix that Muon makes orthogonal, in six tensors of its size and a square one."""
        policy, wide = self.policy, BYTES[self.policy.master or self.policy.state]
        lasting = policy.master is not None
        copies = (wide != self.full) + (not lasting and wide != BYTES[policy.parameter])
        rows = max((row.layout.shard for row in self.rows), default=0) * wide * copies
        if self.layout.config.optim.kind != "muon":
            return rows
        hidden, matrices = self.layout.config.model.hidden_size, self._weights.values()
        sizes = [weight.numel for weight in matrices if is_hidden_matrix(weight.name, weight.dimensions)]
        return rows + max((6 * numel + min(hidden, numel // hidden) ** 2 for numel in sizes), default=0) * wide
