"""Bytes of saved activations: those of one micro-batch in one chunk of the model, and their peak in a step."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Action
from minidist.tools.estimate import saved_tensors
from minidist.tools.estimate.layout import DTYPE_BYTES, ModelChunk, RunLayout
from minidist.tools.estimate.saved_tensors import COMPUTE, PARAMETER, SymbolicTensor
from minidist.tools.estimate.shapes import Dimensions


class LocalTensor(NamedTuple):
    """A tensor saved for backward, with the shape it has on one rank.

    formula: the shape as a formula, such as "b s/cp h" (see `shapes.Dimensions`). shape: the local shape, in elements.
    dtype: a key of DTYPE_BYTES, such as "bfloat16".
    """

    name: str
    formula: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the tensor on one rank."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def list_local_tensors(layout: RunLayout, tensors: Iterable[SymbolicTensor], num_samples: int) -> list[LocalTensor]:
    """Return these saved tensors with the shape and dtype that each has on one rank.

    num_samples: the number of samples in the micro-batch.
    """
    sizes, dtypes = (
        Dimensions.of_micro_batch(layout, num_samples),
        {PARAMETER: layout.dtype, COMPUTE: layout.compute_dtype},
    )
    return [LocalTensor(t.name, t.shape, sizes.local_shape(t.shape), dtypes.get(t.dtype, t.dtype)) for t in tensors]


def local_tensor_bytes(layout: RunLayout, tensors: Iterable[SymbolicTensor], num_samples: int) -> int:
    """Return the bytes of these saved tensors together, on one rank, for a micro-batch of `num_samples` samples."""
    return sum(tensor.bytes for tensor in list_local_tensors(layout, tensors, num_samples))


def saved_by_chunk(layout: RunLayout, chunk: ModelChunk) -> list[SymbolicTensor]:
    """Return the tensors that the forward of one model chunk saves for backward, on every rank of its pipeline stage.

    The first are the cosine and sine tables of the rotary embedding.
    """
    start = saved_tensors.rotary_tables(layout) + (
        saved_tensors.saved_by_embedding(layout) if chunk.has_embedding else []
    )
    layers = saved_tensors.saved_by_layer(layout) * len(chunk.layers)
    return start + layers + (saved_tensors.saved_by_head(layout) if chunk.has_head else [])


class MicroBatchActivationBytes(NamedTuple):
    """Bytes of the activations of one micro-batch in one model chunk, on one rank.

    saved: bytes kept from forward to backward. backward_peak: the peak during backward, recomputed tensors included.
    for_weight_gradients: bytes kept from the input gradient (B) to the weight gradient (W) of a split backward; 0 if
    backward is not split.
    """

    saved: int
    backward_peak: int
    for_weight_gradients: int


def micro_batch_activation_bytes(
    layout: RunLayout, chunk: ModelChunk, num_samples: int, split_backward: bool
) -> MicroBatchActivationBytes:
    """Return the bytes of the activations of one micro-batch of `num_samples` samples in one model chunk, on one rank.

    split_backward: whether the pipeline schedule splits backward into input gradients (B) and, later, weight gradients
    (W).

    Full recomputation restores one layer at a time in backward, while the inputs of the layers before it, and the
    tensors that the layers after it keep for their weight gradients, are live. The tensors of head and loss are freed
    by then. Core attention saves less than the feed-forward layer, which is freed before core attention is recomputed,
    so selective recomputation does not raise the peak.
    """
    if num_samples == 0:
        return MicroBatchActivationBytes(0, 0, 0)  # the chunk does not run

    def size(tensors: Iterable[SymbolicTensor]) -> int:
        return local_tensor_bytes(layout, tensors, num_samples)

    layers = len(chunk.layers)
    saved = size(saved_by_chunk(layout, chunk)[len(saved_tensors.rotary_tables(layout)) :])
    per_layer = size(saved_tensors.saved_for_weight_gradients()) if split_backward else 0
    head = size(saved_tensors.saved_for_head_weight_gradient()) if split_backward and chunk.has_head else 0
    candidates = [saved, layers * per_layer + head]
    if layout.config.recompute == "block":
        before = size(saved_tensors.saved_by_embedding(layout)) if chunk.has_embedding else 0
        layer, recomputed = size(saved_tensors.saved_by_layer(layout)), size(saved_tensors.recomputed_by_layer(layout))
        candidates += [
            before + (i + 1) * layer + recomputed + (layers - 1 - i) * per_layer + head for i in range(layers)
        ]
    return MicroBatchActivationBytes(saved, max(candidates), layers * per_layer + head)


class ActionActivationBytes(NamedTuple):
    """The bytes of activations on a rank of a pipeline stage during one action (F, B or W) of its schedule.

    model_chunk: the chunk of the model that runs the action. micro_batch: the bytes of the action's micro-batch in that
    chunk. other_micro_batches: the bytes of all other micro-batches in flight on the stage.
    """

    action: Action
    model_chunk: ModelChunk
    micro_batch: MicroBatchActivationBytes
    other_micro_batches: int


def walk_schedule_activations(
    layout: RunLayout, stage: int, micro_batch_sizes: Sequence[int]
) -> Iterator[ActionActivationBytes]:
    """Yield the activation bytes during each action of a pipeline stage, in the order of the stage's schedule.

    micro_batch_sizes: the number of samples in each micro-batch.
    """
    chunks, in_flight = layout.stage_chunks(stage), 0
    for action in layout.schedule.orders[stage]:
        chunk, count = chunks[action.chunk], micro_batch_sizes[action.micro_batch]
        own = micro_batch_activation_bytes(layout, chunk, count, layout.schedule.splits_backward)
        in_flight -= {"F": 0, "B": own.saved, "W": own.for_weight_gradients}[action.kind]
        yield ActionActivationBytes(action, chunk, own, in_flight)
        if action.kind == "F":
            in_flight += own.saved
        elif action.kind != layout.schedule.last_action_kind:
            in_flight += own.for_weight_gradients


def peak_activation_bytes(layout: RunLayout, stage: int, micro_batch_sizes: Sequence[int]) -> int:
    """Return the peak bytes of live activations during a step, on a rank of pipeline stage `stage`.

    micro_batch_sizes: the number of samples in each micro-batch. With a pipeline every model chunk keeps each
    micro-batch's activations from its forward to its backward: for equal micro-batches, no split backward and no
    recomputation the peak is the peak number of live micro-batches times the bytes of one. Without a pipeline one
    micro-batch is live at a time.
    """
    tables = local_tensor_bytes(layout, saved_tensors.rotary_tables(layout), 1)  # shared by all micro-batches
    if layout.schedule is None:
        (chunk,) = layout.stage_chunks(stage)
        return tables + max(
            micro_batch_activation_bytes(layout, chunk, count, False).backward_peak for count in set(micro_batch_sizes)
        )
    peaks = [
        others + {"F": own.saved, "B": own.backward_peak, "W": own.for_weight_gradients}[action.kind]
        for action, _, own, others in walk_schedule_activations(layout, stage, micro_batch_sizes)
    ]
    return tables + max(peaks)
