"""Bytes of saved activations: of one micro-batch in one chunk of the model, and their peak in a step."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from minidist.parallel.pipeline.actions import Op
from minidist.tools.estimate import saved_tensors
from minidist.tools.estimate.layout import DTYPE_BYTES, Layout, ModelChunk
from minidist.tools.estimate.saved_tensors import COMPUTE, PARAMETER, SavedTensor
from minidist.tools.estimate.shapes import Dimensions


class LocalTensor(NamedTuple):
    """A saved tensor with its shape and dtype on one rank."""

    name: str
    formula: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def local_tensors(layout: Layout, tensors: Iterable[SavedTensor], samples: int) -> list[LocalTensor]:
    """The tensors on one rank, for a micro-batch of `samples` samples."""
    sizes, dtypes = Dimensions.of(layout, samples), {PARAMETER: layout.dtype, COMPUTE: layout.compute_dtype}
    return [LocalTensor(t.name, t.shape, sizes.shape(t.shape), dtypes.get(t.dtype, t.dtype)) for t in tensors]


def local_bytes(layout: Layout, tensors: Iterable[SavedTensor], samples: int) -> int:
    """Their total bytes on one rank."""
    return sum(tensor.bytes for tensor in local_tensors(layout, tensors, samples))


def saved_by_chunk(layout: Layout, chunk: ModelChunk) -> list[SavedTensor]:
    """The tensors that the forward of one chunk saves, the rotary tables first."""
    start = saved_tensors.rotary_tables(layout) + (saved_tensors.saved_by_embedding(layout) if chunk.first else [])
    layers = saved_tensors.saved_by_layer(layout) * len(chunk.layers)
    return start + layers + (saved_tensors.saved_by_head(layout) if chunk.last else [])


class MicroBatchBytes(NamedTuple):
    """Activation bytes of one micro-batch in one chunk. saved: from forward to backward; backward_peak: while backward
    runs, including what it recomputes; for_weight_gradients: from B to W of a split backward."""

    saved: int
    backward_peak: int
    for_weight_gradients: int


def micro_batch_bytes(layout: Layout, chunk: ModelChunk, samples: int, split_backward: bool) -> MicroBatchBytes:
    """Activation bytes of a micro-batch of `samples` samples in one chunk.

    Full recomputation restores one layer at a time in backward, while the inputs of the layers before it, and what the
    layers after it keep for their weight gradients, are live. The tensors of head and loss are freed by then. Core
    attention saves less than the feed-forward layer, which is freed before core attention is recomputed, so selective
    recomputation has no peak of its own.
    """
    if samples == 0:
        return MicroBatchBytes(0, 0, 0)  # the chunk does not run

    def size(tensors: Iterable[SavedTensor]) -> int:
        return local_bytes(layout, tensors, samples)

    layers = len(chunk.layers)
    saved = size(saved_by_chunk(layout, chunk)[len(saved_tensors.rotary_tables(layout)) :])
    per_layer = size(saved_tensors.saved_for_weight_gradients()) if split_backward else 0
    head = size(saved_tensors.saved_for_head_weight_gradient()) if split_backward and chunk.last else 0
    candidates = [saved, layers * per_layer + head]
    if layout.config.recompute == "block":
        before = size(saved_tensors.saved_by_embedding(layout)) if chunk.first else 0
        layer, recomputed = size(saved_tensors.saved_by_layer(layout)), size(saved_tensors.recomputed_by_layer(layout))
        candidates += [
            before + (i + 1) * layer + recomputed + (layers - 1 - i) * per_layer + head for i in range(layers)
        ]
    return MicroBatchBytes(saved, max(candidates), layers * per_layer + head)


def walk_schedule(
    layout: Layout, stage: int, samples: list[int]
) -> Iterator[tuple[Op, ModelChunk, MicroBatchBytes, int]]:
    """Every action of a pipeline stage in the order of its schedule.

    Yields (action, chunk, activation bytes of its micro-batch, activation bytes of all other micro-batches in flight).
    """
    chunks, in_flight = layout.chunks(stage), 0
    for op in layout.schedule.orders[stage]:
        chunk, count = chunks[op.chunk], samples[op.micro_batch]
        own = micro_batch_bytes(layout, chunk, count, layout.schedule.splits_backward)
        in_flight -= {"F": 0, "B": own.saved, "W": own.for_weight_gradients}[op.kind]
        yield op, chunk, own, in_flight
        if op.kind == "F":
            in_flight += own.saved
        elif op.kind != layout.schedule.last_kind:
            in_flight += own.for_weight_gradients


def peak_activation_bytes(layout: Layout, stage: int, micro_batches: Iterable[int]) -> int:
    """The peak bytes of live activations on a rank of a stage during a step.

    micro_batches: the samples in each. With a pipeline every chunk keeps each micro-batch from its forward to its
    backward: for equal micro-batches, no split backward and no recomputation the peak is `peak_live` times the bytes of
    one. Without a pipeline one micro-batch is live at a time.
    """
    samples = list(micro_batches)
    tables = local_bytes(layout, saved_tensors.rotary_tables(layout), 1)  # shared by all micro-batches
    if layout.schedule is None:
        (chunk,) = layout.chunks(stage)
        return tables + max(micro_batch_bytes(layout, chunk, count, False).backward_peak for count in set(samples))
    peaks = [
        others + {"F": own.saved, "B": own.backward_peak, "W": own.for_weight_gradients}[op.kind]
        for op, _, own, others in walk_schedule(layout, stage, samples)
    ]
    return tables + max(peaks)
