"""The peak of all tensors of a rank during one step, and its breakdown.

The candidates are, in the order of the schedule, the end of every forward and every event of every backward
(`backward_events`), each with the activations of the other micro-batches in flight, gradients and ZeRO's buffers
(`temporary_buffers`); then the update and the merge of replicas.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from minidist.tools.estimate import activations, backward_events, saved_tensors, states
from minidist.tools.estimate.backward_events import FOR_WEIGHT_GRADIENT, VOCABULARY_GRADIENT, BackwardEvent
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.saved_tensors import SHARDED_HIDDEN, SymbolicTensor
from minidist.tools.estimate.shards import LocalFlatParam
from minidist.tools.estimate.temporary_buffers import DONE, EMBEDDING, HEAD, GradientAndBufferSizes

_BOUNDARY = SymbolicTensor("hidden state between two layers", SHARDED_HIDDEN)  # or its gradient


class LiveBytes(NamedTuple):
    """Bytes of activations, gradients and temporary buffers that are live on a rank at one time of a step."""

    activations: int = 0
    gradients: int = 0
    buffers: int = 0


class PeakBytes(NamedTuple):
    """The peak bytes of a rank during a step.

    at_peak: the bytes of each kind at the time when all of them together peak. activations, buffers: the peak of each
    of these kinds alone, which may occur at another time of the step.
    """

    at_peak: LiveBytes
    activations: int
    buffers: int


class _Point(NamedTuple):
    """The bytes that are live at one event of a backward.

    place: the layer, head or embedding whose backward runs, as in `temporary_buffers`. ready: how many of its gradients
    are computed. activations: at this event. activations_at_entry: before the backward of this place. buffers:
    temporary tensors. head_gradient: of these, the gradient of a tied head, to which the embedding's is added.
    """

    place: int | str
    ready: int = 0
    activations: int = 0
    activations_at_entry: int = 0
    buffers: int = 0
    head_gradient: int = 0


class StepMemory:
    """Computes the peak memory of a step on a rank of a pipeline stage, without parameters and optimizer states.

    flat_params: the rank's flat parameters, in the order in which backward completes their gradients. gradient_bytes:
    bytes of the gradients just before the update. micro_batch_sizes: the number of samples in each micro-batch.
    """

    def __init__(
        self,
        layout: RunLayout,
        stage: int,
        flat_params: Sequence[LocalFlatParam],
        gradient_bytes: int,
        micro_batch_sizes: Sequence[int],
    ):
        self.layout, self.stage, self.micro_batch_sizes = layout, stage, list(micro_batch_sizes)
        self.temporary = GradientAndBufferSizes(
            layout, stage, flat_params, gradient_bytes, accumulates=len(micro_batch_sizes) > 1
        )
        self._forward_peak, self._backward_peak = cache(self._forward_peak), cache(self._backward_peak)
        self._weight_gradient_peak = cache(self._weight_gradient_peak)

    def compute_peak(self) -> PeakBytes:
        """Return three peaks: activations, gradients and buffers together; activations alone; buffers alone."""
        tables = self._tensor_bytes(saved_tensors.rotary_tables(self.layout), 1)  # shared by all micro-batches
        after = max(
            self.temporary.reduce_dtype_copy_bytes_after_backward(),
            self.temporary.optimizer_temporary_bytes(),
            self.temporary.merge_temporary_bytes(),
        )
        update = LiveBytes(0, self.temporary.gradient_bytes, after)
        peaks = [PeakBytes(update, 0, after), *self._action_peaks()]
        total = max((peak.at_peak for peak in peaks), key=sum)
        return PeakBytes(
            total._replace(activations=total.activations + tables),
            max(peak.activations for peak in peaks) + tables,
            max(peak.buffers for peak in peaks),
        )

    def _action_peaks(self) -> Iterator[PeakBytes]:
        """Yield the peak within each action of the schedule."""
        layout, schedule = self.layout, self.layout.schedule
        if schedule is None:
            for count in set(self.micro_batch_sizes) - {0}:
                yield self._forward_peak(0, count)
                yield self._backward_peak(0, count, False)
            return
        received_in_flight, sent = 0, 0
        for action, chunk, _, others in activations.walk_schedule_activations(
            layout, self.stage, self.micro_batch_sizes
        ):
            count, split = self.micro_batch_sizes[action.micro_batch], schedule.splits_backward
            boundary = self._tensor_bytes([_BOUNDARY], count)
            # Where the first norm upcasts its input, the received tensor itself is kept too.
            received = 0 if chunk.has_embedding or layout.dtype == layout.compute_dtype else boundary
            buffers = received_in_flight + min(sent, schedule.num_stages) * boundary
            if action.kind == "F":
                yield _add_other_micro_batches(self._forward_peak(action.chunk, count), others, buffers + received)
                received_in_flight += received
            if action.kind == "B":
                received_in_flight -= received
                yield _add_other_micro_batches(self._backward_peak(action.chunk, count, split), others, buffers)
            if action.kind == schedule.last_action_kind:
                yield _add_other_micro_batches(self._weight_gradient_peak(action.chunk, count, split), others, buffers)
            sent += schedule.consumer(self.stage, action) is not None

    def _tensor_bytes(self, tensors: Iterable[SymbolicTensor], samples: int) -> int:
        """Return the bytes of these tensors on one rank, for a micro-batch of `samples` samples."""
        return activations.local_tensor_bytes(self.layout, tensors, samples)

    def _forward_peak(self, chunk: int, samples: int) -> PeakBytes:
        """Return the peak of a forward: at its end, or under full recomputation in its last layer."""
        if not samples:
            return _peak_of([])
        layout, model_chunk = self.layout, self.layout.stage_chunks(self.stage)[chunk]
        gradients = self.temporary.gradient_bytes_before_backward()
        saved = activations.micro_batch_activation_bytes(layout, model_chunk, samples, False).saved
        buffers = self.temporary.gathered_parameter_bytes(chunk, HEAD, forward=True)
        buffers += self.temporary.gradient_and_buffer_bytes(chunk, HEAD, 0)[1]
        end = backward_events.loss_temporaries(layout) if model_chunk.has_head else [_BOUNDARY, _BOUNDARY]
        candidates = [LiveBytes(saved, gradients, self._tensor_bytes(end, samples) + buffers)]
        if layout.config.recompute == "block":
            saved -= self._tensor_bytes(saved_tensors.saved_by_head(layout), samples) if model_chunk.has_head else 0
            inside = self._tensor_bytes(backward_events.layer_forward_temporaries(layout), samples)
            candidates.append(LiveBytes(saved, gradients, inside + buffers))
        return _peak_of(candidates)

    def _backward_peak(self, chunk: int, samples: int, split: bool) -> PeakBytes:
        """Return the peak of a backward. split: whether weight gradients are computed later."""
        return _peak_of(self._backward_points(chunk, samples, split) if samples else [])

    def _backward_points(self, chunk: int, samples: int, split: bool) -> Iterator[LiveBytes]:
        """Yield the live bytes at every event of a backward, and while each completed flat gradient is filled."""
        temporary, launched_before, before = self.temporary, 0, _Point(HEAD)
        for point in [*self._points(chunk, samples, split), _Point(DONE)]:
            place, ready = point.place, point.ready
            launched = temporary.launched_reductions(chunk, place, ready) if temporary.zero.shards_gradients else ()
            saved = before.activations if place == before.place else point.activations_at_entry
            others = self._tensor_bytes([_BOUNDARY, _BOUNDARY], samples) + before.head_gradient if place != DONE else 0
            others += temporary.gathered_parameter_bytes(chunk, place, prefetching=False)
            for number in range(launched_before, len(launched)):
                gradients, buffers = temporary.bytes_while_filling_flat_gradient(chunk, number, place, ready)
                yield LiveBytes(saved, gradients, others + buffers)
            launched_before, before = len(launched), point
            if place != DONE:
                gradients, buffers = temporary.gradient_and_buffer_bytes(chunk, place, ready, split)
                gathered = temporary.gathered_parameter_bytes(chunk, place)
                yield LiveBytes(point.activations, gradients, point.buffers + gathered + buffers)

    def _points(self, chunk: int, samples: int, split: bool) -> Iterator[_Point]:
        """Yield the events of the backward of head, layers and embedding, in the order of execution."""
        layout, model_chunk = self.layout, self.layout.stage_chunks(self.stage)[chunk]
        tied = layout.config.model.tie_embeddings
        embedding_saved = saved_tensors.saved_by_embedding(layout)
        embedding = self._tensor_bytes(embedding_saved, samples) if model_chunk.has_embedding else 0
        layer = self._tensor_bytes(saved_tensors.saved_by_layer(layout), samples)
        head_gradient = (
            self._tensor_bytes(VOCABULARY_GRADIENT, samples)
            if model_chunk.has_head and model_chunk.has_embedding and tied and not split
            else 0
        )

        def point(place: int | str, event: BackwardEvent, saved: int, at_entry: int) -> _Point:
            head = head_gradient * (place not in (HEAD, EMBEDDING))
            waiting = self._tensor_bytes([t for t in event.temporaries if t.name == FOR_WEIGHT_GRADIENT], samples)
            buffers = self._tensor_bytes(event.temporaries, samples) - waiting
            return _Point(place, event.num_ready_gradients, saved + waiting, at_entry, buffers + head, head)

        if model_chunk.has_head:
            saved, below = saved_tensors.saved_by_head(layout), embedding + len(model_chunk.layers) * layer
            for event in backward_events.head_backward_events(layout, split):
                yield point(HEAD, event, below + self._tensor_bytes(saved[: event.num_saved], samples), below)
        per_layer = self._tensor_bytes(saved_tensors.saved_for_weight_gradients(), samples) if split else 0
        waiting = (
            self._tensor_bytes(saved_tensors.saved_for_head_weight_gradient(), samples)
            if split and model_chunk.has_head
            else 0
        )
        recompute = layout.config.recompute == "block"
        all_saved = saved_tensors.saved_by_layer_without_recompute(layout)
        saved = saved_tensors.recomputed_by_layer(layout) if recompute else all_saved
        kept_input = len(all_saved) - len(saved)  # 1 where the layer's input was kept, so it is not recomputed
        for position, layer_index in reversed(list(enumerate(model_chunk.layers))):
            for event in backward_events.layer_backward_events(layout, split):
                live = embedding + (position + recompute) * layer
                live += self._tensor_bytes(saved[: event.num_saved - kept_input], samples)
                yield point(layer_index, event, live + waiting, embedding + (position + 1) * layer + waiting)
            waiting += per_layer
        if model_chunk.has_embedding:
            for event in backward_events.embedding_backward_events(layout, bool(head_gradient)):
                yield point(
                    EMBEDDING, event, self._tensor_bytes(embedding_saved[: event.num_saved], samples), embedding
                )

    def _weight_gradient_peak(self, chunk: int, samples: int, split: bool) -> PeakBytes:
        """Return the peak of the weight gradients (W) of a split backward: at the start or at the end."""
        if not split or not samples:
            return _peak_of([])
        model_chunk = self.layout.stage_chunks(self.stage)[chunk]
        waiting = activations.micro_batch_activation_bytes(
            self.layout, model_chunk, samples, split
        ).for_weight_gradients
        largest = VOCABULARY_GRADIENT if model_chunk.has_head else backward_events.LARGEST_LAYER_GRADIENT
        others = self._tensor_bytes(largest, samples) + self.temporary.gathered_parameter_bytes(
            chunk, model_chunk.layers[0]
        )
        candidates = []
        for saved, at_start in ((waiting, True), (0, False)):
            ready = len(states.LAYER_PARAMETERS)
            gradients, buffers = self.temporary.gradient_and_buffer_bytes(chunk, model_chunk.layers[0], ready, at_start)
            candidates.append(LiveBytes(saved, gradients, others + buffers))
        return _peak_of(candidates)


def _peak_of(candidates: Iterable[LiveBytes]) -> PeakBytes:
    """Return the peaks over all candidates: of all kinds together, and of activations and buffers alone."""
    candidates = list(candidates) or [LiveBytes()]
    saved, buffers = (max(getattr(live, kind) for live in candidates) for kind in ("activations", "buffers"))
    return PeakBytes(max(candidates, key=sum), saved, buffers)


def _add_other_micro_batches(peak: PeakBytes, activation_bytes: int, buffer_bytes: int) -> PeakBytes:
    """Return the peak with the activations and buffers of other micro-batches in flight added."""
    total = peak.at_peak
    total = total._replace(activations=total.activations + activation_bytes, buffers=total.buffers + buffer_bytes)
    return PeakBytes(total, peak.activations + activation_bytes, peak.buffers + buffer_bytes)
