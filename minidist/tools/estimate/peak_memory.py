"""The peak of all tensors of a rank during one step, and its breakdown.

The walk goes through the schedule: the end of every forward, every event of every backward (`backward_events`), with
the activations of the other micro-batches in flight, gradients and ZeRO's buffers (`temporary_buffers`); then the
update.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from minidist.tools.estimate import activations, backward_events, saved_tensors, states
from minidist.tools.estimate.backward_events import FOR_WEIGHT_GRADIENT, VOCABULARY_GRADIENT, BackwardEvent
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.saved_tensors import SHARDED_HIDDEN, SavedTensor
from minidist.tools.estimate.shards import Row
from minidist.tools.estimate.temporary_buffers import DONE, EMBEDDING, HEAD, TemporaryBuffers

_BOUNDARY = SavedTensor("hidden state between two layers", SHARDED_HIDDEN)  # or its gradient


class LiveBytes(NamedTuple):
    """Bytes of the tensors that change during a step, at one point of it."""

    activations: int = 0
    gradients: int = 0
    buffers: int = 0


class PeakBytes(NamedTuple):
    """total: the breakdown where all tensors together peak. activations, buffers: the peak of each by itself."""

    total: LiveBytes
    activations: int
    buffers: int


class _Point(NamedTuple):
    """A backward event with its bytes. place, ready: where, and how many gradients of the module there are computed.
    activations: now; activations_at_entry: before this module's backward. buffers: temporaries; head_gradient: of
    those, a tied head's gradient that the embedding's is added to."""

    place: int | str
    ready: int = 0
    activations: int = 0
    activations_at_entry: int = 0
    buffers: int = 0
    head_gradient: int = 0


class PeakMemory:
    """Finds the peak on the ranks of one stage.

    flat_groups: their flat parameter groups; gradient_bytes: the gradients that persist; samples: in each micro-batch.
    """

    def __init__(
        self, layout: Layout, stage: int, flat_groups: Sequence[Row], gradient_bytes: int, samples: Sequence[int]
    ):
        self.layout, self.stage, self.samples = layout, stage, list(samples)
        self.temporary = TemporaryBuffers(layout, stage, flat_groups, gradient_bytes, several=len(samples) > 1)
        self._forward, self._backward, self._weights = cache(self._forward), cache(self._backward), cache(self._weights)

    def find(self) -> PeakBytes:
        """The peak of a step."""
        tables = self._size(saved_tensors.rotary_tables(self.layout), 1)  # shared by all micro-batches
        after = max(self.temporary.wire_copies_after_backward(), self.temporary.optimizer_temporary_bytes())
        update = LiveBytes(0, self.temporary.gradient_bytes, after)
        found = [PeakBytes(update, 0, after), *self._actions()]
        total = max((each.total for each in found), key=sum)
        return PeakBytes(
            total._replace(activations=total.activations + tables),
            max(each.activations for each in found) + tables,
            max(each.buffers for each in found),
        )

    def _actions(self) -> Iterator[PeakBytes]:
        """The peak within each action of the schedule."""
        layout, schedule = self.layout, self.layout.schedule
        if schedule is None:
            for count in set(self.samples) - {0}:
                yield self._forward(0, count)
                yield self._backward(0, count, False)
            return
        received_in_flight, sent = 0, 0
        for op, chunk, _, others in activations.walk_schedule(layout, self.stage, self.samples):
            count, split = self.samples[op.micro_batch], schedule.splits_backward
            boundary = self._size([_BOUNDARY], count)
            # Where the first norm upcasts its input, the received tensor itself is kept too.
            received = 0 if chunk.first or layout.dtype == layout.compute_dtype else boundary
            buffers = received_in_flight + min(sent, schedule.stages) * boundary
            if op.kind == "F":
                yield _add(self._forward(op.chunk, count), others, buffers + received)
                received_in_flight += received
            if op.kind == "B":
                received_in_flight -= received
                yield _add(self._backward(op.chunk, count, split), others, buffers)
            if op.kind == schedule.last_kind:
                yield _add(self._weights(op.chunk, count, split), others, buffers)
            sent += schedule.feeds(self.stage, op) is not None

    def _size(self, tensors: Iterable[SavedTensor], samples: int) -> int:
        return activations.local_bytes(self.layout, tensors, samples)

    def _forward(self, chunk: int, samples: int) -> PeakBytes:
        """The end of a forward, when everything is saved; with full recomputation also its last layer."""
        if not samples:
            return _peak_of([])
        layout, part = self.layout, self.layout.chunks(self.stage)[chunk]
        gradients = self.temporary.gradient_bytes_before_backward()
        saved = activations.micro_batch_bytes(layout, part, samples, False).saved
        buffers = self.temporary.gathered_parameter_bytes(chunk, HEAD, forward=True)
        buffers += self.temporary.gradient_and_buffer_bytes(chunk, HEAD, 0)[1]
        end = backward_events.loss_temporaries(layout) if part.last else [_BOUNDARY, _BOUNDARY]
        found = [LiveBytes(saved, gradients, self._size(end, samples) + buffers)]
        if layout.config.recompute == "block":
            saved -= self._size(saved_tensors.saved_by_head(layout), samples) if part.last else 0
            inside = self._size(backward_events.layer_forward_temporaries(layout), samples)
            found.append(LiveBytes(saved, gradients, inside + buffers))
        return _peak_of(found)

    def _backward(self, chunk: int, samples: int, split: bool) -> PeakBytes:
        """The peak within a backward. split: weight gradients are computed later."""
        return _peak_of(self._backward_points(chunk, samples, split) if samples else [])

    def _backward_points(self, chunk: int, samples: int, split: bool) -> Iterator[LiveBytes]:
        """Every event of a backward and, between two events, the filling of each flat gradient that became ready."""
        temporary, launched_before, before = self.temporary, 0, _Point(HEAD)
        for point in [*self._points(chunk, samples, split), _Point(DONE)]:
            at, ready = point.place, point.ready
            launched = temporary.launched_reductions(chunk, at, ready) if temporary.zero.shares_gradients else ()
            saved = before.activations if at == before.place else point.activations_at_entry
            others = self._size([_BOUNDARY, _BOUNDARY], samples) + before.head_gradient if at != DONE else 0
            others += temporary.gathered_parameter_bytes(chunk, at, prefetching=False)
            for number in range(launched_before, len(launched)):
                gradients, buffers = temporary.bytes_while_filling(chunk, number, at, ready)
                yield LiveBytes(saved, gradients, others + buffers)
            launched_before, before = len(launched), point
            if at != DONE:
                gradients, buffers = temporary.gradient_and_buffer_bytes(chunk, at, ready, split)
                gathered = temporary.gathered_parameter_bytes(chunk, at)
                yield LiveBytes(point.activations, gradients, point.buffers + gathered + buffers)

    def _points(self, chunk: int, samples: int, split: bool) -> Iterator[_Point]:
        layout, part, tied = self.layout, self.layout.chunks(self.stage)[chunk], self.layout.config.model.tie_embeddings
        embedding_saved = saved_tensors.saved_by_embedding(layout)
        embedding = self._size(embedding_saved, samples) if part.first else 0
        layer = self._size(saved_tensors.saved_by_layer(layout), samples)
        head_gradient = (
            self._size(VOCABULARY_GRADIENT, samples) if part.last and part.first and tied and not split else 0
        )

        def point(place: int | str, event: BackwardEvent, saved: int, at_entry: int) -> _Point:
            head = head_gradient * (place not in (HEAD, EMBEDDING))
            waiting = self._size([t for t in event.temporaries if t.name == FOR_WEIGHT_GRADIENT], samples)
            buffers = self._size(event.temporaries, samples) - waiting
            return _Point(place, event.ready, saved + waiting, at_entry, buffers + head, head)

        if part.last:
            saved, below = saved_tensors.saved_by_head(layout), embedding + len(part.layers) * layer
            for event in backward_events.head_backward(layout, split):
                yield point(HEAD, event, below + self._size(saved[: event.saved], samples), below)
        per_layer = self._size(saved_tensors.saved_for_weight_gradients(), samples) if split else 0
        waiting = self._size(saved_tensors.saved_for_head_weight_gradient(), samples) if split and part.last else 0
        recompute = layout.config.recompute == "block"
        all_saved = saved_tensors.saved_without_recompute(layout)
        saved = saved_tensors.recomputed_by_layer(layout) if recompute else all_saved
        kept_input = len(all_saved) - len(saved)  # 1 where the layer's input was kept, so it is not recomputed
        for position, index in reversed(list(enumerate(part.layers))):
            for event in backward_events.layer_backward(layout, split):
                live = embedding + (position + recompute) * layer
                live += self._size(saved[: event.saved - kept_input], samples)
                yield point(index, event, live + waiting, embedding + (position + 1) * layer + waiting)
            waiting += per_layer
        if part.first:
            for event in backward_events.embedding_backward(layout, bool(head_gradient)):
                yield point(EMBEDDING, event, self._size(embedding_saved[: event.saved], samples), embedding)

    def _weights(self, chunk: int, samples: int, split: bool) -> PeakBytes:
        """The peak while the weight gradients of a split backward are computed: at its start and at its end."""
        if not split or not samples:
            return _peak_of([])
        part = self.layout.chunks(self.stage)[chunk]
        waiting = activations.micro_batch_bytes(self.layout, part, samples, split).for_weight_gradients
        largest = VOCABULARY_GRADIENT if part.last else backward_events.LARGEST_LAYER_GRADIENT
        others = self._size(largest, samples) + self.temporary.gathered_parameter_bytes(chunk, part.layers[0])
        found = []
        for saved, at_start in ((waiting, True), (0, False)):
            ready = len(states.LAYER)
            gradients, buffers = self.temporary.gradient_and_buffer_bytes(chunk, part.layers[0], ready, at_start)
            found.append(LiveBytes(saved, gradients, others + buffers))
        return _peak_of(found)


def _peak_of(candidates: Iterable[LiveBytes]) -> PeakBytes:
    candidates = list(candidates) or [LiveBytes()]
    saved, buffers = (max(getattr(live, kind) for live in candidates) for kind in ("activations", "buffers"))
    return PeakBytes(max(candidates, key=sum), saved, buffers)


def _add(found: PeakBytes, activation_bytes: int, buffer_bytes: int) -> PeakBytes:
    """The same peak with the activations and buffers of other micro-batches added."""
    total = found.total
    total = total._replace(activations=total.activations + activation_bytes, buffers=total.buffers + buffer_bytes)
    return PeakBytes(total, found.activations + activation_bytes, found.buffers + buffer_bytes)
