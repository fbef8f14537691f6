"""The moment of a step in which a rank holds most, and what it holds then.

Forward ends, and every moment of every backward, are gone through in the order of the schedule, as `moments` and
`activations` describe them; beside them the rows of parameters and gradients that ZeRO has for a while; and the update.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from minidist.tools.estimate import activations, blocks, states
from minidist.tools.estimate import events as moments
from minidist.tools.estimate.blocks import BETWEEN, Saved
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.shards import Row
from minidist.tools.estimate.temporary_buffers import END, FIRST, OVER, Passing


class Held(NamedTuple):
    """Bytes at one time, of what changes in a step."""

    activations: int = 0
    gradients: int = 0
    buffers: int = 0


class Moved(NamedTuple):
    """What there is at a moment of a backward beside rows and gradients. at, come: the place, and how many of its
    gradients are there. kept, begin: activations now, and before this piece began. there: buffers; waits: of those, a
    gradient of the head that the embedding's is added to."""

    at: int | str
    come: int = 0
    kept: int = 0
    begin: int = 0
    there: int = 0
    waits: int = 0


class Found(NamedTuple):
    """peak: when all of it together is most. activations, buffers: the most of them at any time."""

    peak: Held
    activations: int
    buffers: int


class Peak:
    """Of the ranks of a stage. rows: those in which their parameters lie; gradients: bytes that stay of them; samples:
    in each micro-batch."""

    def __init__(self, layout: Layout, stage: int, rows: Sequence[Row], gradients: int, samples: Sequence[int]):
        self.layout, self.stage, self.samples = layout, stage, samples
        self.passing = Passing(layout, stage, rows, gradients, many=len(samples) > 1)
        self._forward, self._backward, self._weights = cache(self._forward), cache(self._backward), cache(self._weights)

    def found(self) -> Found:
        """The most of a step."""
        tables = activations.size(self.layout, blocks.positions(self.layout), 1)  # the same for all micro-batches
        found = list(self._step())
        update = Held(0, self.passing.all, max(self.passing.finish(), self.passing.update()))
        peak = max([update, *(each.peak for each in found)], key=sum)
        kept = max([0, *(each.activations for each in found)])
        buffers = max([update.buffers, *(each.buffers for each in found)])
        return Found(peak._replace(activations=peak.activations + tables), kept + tables, buffers)

    def _step(self) -> Iterator[Found]:
        """Whatever is most, by operation."""
        schedule, chunks = self.layout.schedule, self.layout.chunks(self.stage)
        if schedule is None:
            for count in set(self.samples) - {0}:
                yield self._forward(0, count)
                yield self._backward(0, count, False)
            return
        alive, between, sent = 0, 0, 0
        for op in schedule.orders[self.stage]:
            count, part = self.samples[op.micro_batch], chunks[op.chunk]
            later = schedule.splits_backward or not (part.first or self.layout.config.compile)
            each = activations.a_pass(self.layout, part, count, later)
            passed = self._size([_PASSED], count)
            # What came in is kept by who received it too, where the first norm has widened it.
            came = 0 if part.first or self.layout.dtype == self.layout.compute_dtype else passed
            sends = between + min(sent, schedule.stages) * passed
            if op.kind == "F":
                yield _beside(self._forward(op.chunk, count), alive, sends + came)
                alive, between = alive + each.kept, between + came
            if op.kind == "B":
                alive, between = alive - each.kept, between - came
                yield _beside(self._backward(op.chunk, count, later), alive, sends)
                alive += each.halves
            if op.kind == schedule.last_kind:
                alive -= each.halves
                yield _beside(self._weights(op.chunk, count, later), alive, sends)
            sent += schedule.feeds(self.stage, op) is not None

    def _size(self, tensors: Iterable[Saved], samples: int) -> int:
        return activations.size(self.layout, tensors, samples)

    def _forward(self, chunk: int, samples: int) -> Found:
        """At the end of a forward, when all is there that is kept; and in its last layer, where that keeps nothing."""
        if not samples:
            return _most([])
        part, gradients = self.layout.chunks(self.stage)[chunk], self.passing.before()
        kept = activations.a_pass(self.layout, part, samples, False).kept
        rows = self.passing.gathered(chunk, END, forward=True) + self.passing.at(chunk, END, 0)[1]
        there = moments.loss(self.layout) if part.last else [_PASSED, _PASSED]
        found = [Held(kept, gradients, self._size(there, samples) + rows)]
        if self.layout.config.recompute == "block":
            kept -= self._size(blocks.end(self.layout), samples) if part.last else 0
            found.append(Held(kept, gradients, self._size(moments.forgotten(self.layout), samples) + rows))
        return _most(found)

    def _backward(self, chunk: int, samples: int, later: bool) -> Found:
        """While a backward runs. later: whether it leaves weights for later."""
        return _most(self._through(chunk, samples, later) if samples else [])

    def _through(self, chunk: int, samples: int, later: bool) -> Iterator[Held]:
        """Every moment, and between two of them the making of rows whose gradients have come meanwhile."""
        begun, before = 0, Moved(END)
        for moved in [*self._moments(chunk, samples, later), Moved(OVER)]:
            launched = self.passing.launched(chunk, moved.at, moved.come) if self.passing.zero.shares_gradients else ()
            kept = before.kept if moved.at == before.at else moved.begin
            beside = self._size([_PASSED, _PASSED], samples) + before.waits if moved.at != OVER else 0
            beside += self.passing.gathered(chunk, moved.at, ahead=False)
            for number in range(begun, len(launched)):
                gradients, passing = self.passing.making(chunk, number, moved.at, moved.come)
                yield Held(kept, gradients, beside + passing)
            begun, before = len(launched), moved
            if moved.at != OVER:
                gradients, passing = self.passing.at(chunk, moved.at, moved.come, later)
                yield Held(moved.kept, gradients, moved.there + self.passing.gathered(chunk, moved.at) + passing)

    def _moments(self, chunk: int, samples: int, later: bool) -> Iterator[Moved]:
        layout, part, tied = self.layout, self.layout.chunks(self.stage)[chunk], self.layout.config.model.tie_embeddings
        first = self._size(blocks.embedding(layout), samples) if part.first else 0
        each = self._size(blocks.layer(layout), samples)
        waits = self._size(moments.HEAD, samples) if part.last and part.first and tied and not later else 0

        def moved(at: int | str, moment: moments.Moment, kept: int, begin: int) -> Moved:
            still = waits * (at not in (END, FIRST))
            left = self._size([tensor for tensor in moment.there if tensor.name == moments.LATER], samples)
            there = self._size(moment.there, samples) - left
            return Moved(at, moment.come, kept + left, begin, there + still, still)

        if part.last:
            saved, below = blocks.end(layout), first + len(part.layers) * each
            for moment in moments.end(layout, later):
                yield moved(END, moment, below + self._size(saved[: moment.kept], samples), below)
        half, passed = (self._size(blocks.halves(), samples), 0) if later else (0, 0)
        passed += self._size(blocks.end_halves(), samples) if later and part.last else 0
        again = layout.config.recompute == "block"
        saved = blocks.again(layout) if again else blocks.forward(layout)
        missing = len(blocks.forward(layout)) - len(saved)  # its input is kept already
        for place, index in reversed(list(enumerate(part.layers))):
            for moment in moments.layer(layout, later):
                kept = first + (place + again) * each + self._size(saved[: moment.kept - missing], samples)
                yield moved(index, moment, kept + passed, first + (place + 1) * each + passed)
            passed += half
        if part.first:
            for moment in moments.embedding(layout, bool(waits)):
                yield moved(FIRST, moment, self._size(blocks.embedding(layout)[: moment.kept], samples), first)

    def _weights(self, chunk: int, samples: int, later: bool) -> Found:
        """While the weights' gradients are made of what a backward has left."""
        if not later or not samples:
            return _most([])
        part = self.layout.chunks(self.stage)[chunk]
        halves = activations.a_pass(self.layout, part, samples, later).halves
        largest = self._size(moments.HEAD if part.last else moments.WEIGHT, samples)
        largest += self.passing.gathered(chunk, part.layers[0])
        found = []
        for still, begins in ((halves, True), (0, False)):
            gradients, rows = self.passing.at(chunk, part.layers[0], len(states.LAYER), begins)
            found.append(Held(still, gradients, largest + rows))
        return _most(found)


_PASSED = Saved("passed on", BETWEEN)


def _most(candidates: Iterable[Held]) -> Found:
    candidates = list(candidates) or [Held()]
    kept, buffers = (max(getattr(held, kind) for held in candidates) for kind in ("activations", "buffers"))
    return Found(max(candidates, key=sum), kept, buffers)


def _beside(found: Found, alive: int, buffers: int) -> Found:
    """The same while other micro-batches are alive."""
    peak = found.peak._replace(activations=found.peak.activations + alive, buffers=found.peak.buffers + buffers)
    return Found(peak, found.activations + alive, found.buffers + buffers)
