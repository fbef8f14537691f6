"""Bytes kept from forward to backward: of a micro-batch in a part of the model, and at most at one time."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from minidist.tools.estimate import blocks
from minidist.tools.estimate.blocks import COMPUTE, PARAMETER, Saved
from minidist.tools.estimate.layout import BYTES, Layout, Part
from minidist.tools.estimate.shapes import Sizes


def kept(layout: Layout, part: Part) -> list[Saved]:
    """The tensors that one pass through a part of the model keeps, `blocks.positions` first."""
    found = blocks.positions(layout) + (blocks.embedding(layout) if part.first else [])
    return found + blocks.layer(layout) * len(part.layers) + (blocks.end(layout) if part.last else [])


class Tensor(NamedTuple):
    """A saved tensor as a rank has it."""

    name: str
    formula: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def on_a_rank(layout: Layout, tensors: Iterable[Saved], samples: int) -> list[Tensor]:
    """The described tensors with so many samples in the micro-batch."""
    sizes, dtypes = Sizes.of(layout, samples), {PARAMETER: layout.dtype, COMPUTE: layout.compute_dtype}
    return [Tensor(t.name, t.shape, sizes.shape(t.shape), dtypes.get(t.dtype, t.dtype)) for t in tensors]


def size(layout: Layout, tensors: Iterable[Saved], samples: int) -> int:
    """Their bytes on one rank."""
    return sum(tensor.bytes for tensor in on_a_rank(layout, tensors, samples))


class Pass(NamedTuple):
    """Bytes of one micro-batch in one part of the model. kept: from forward to backward; most: while backward runs,
    what it computes again with it; halves: from backward to the weights' half."""

    kept: int
    most: int
    halves: int


def a_pass(layout: Layout, part: Part, samples: int, in_halves: bool) -> Pass:
    """What so many samples in a micro-batch take. in_halves: whether the part's backward leaves weights for later.

    Backward computes a layer again from its input, so it needs all of one layer at a time, beside the inputs of those
    before it and the halves of those after it. What comes after the last layer is gone by then. The core of a layer's
    attention is less than its feed-forward layer, which is gone when the core is computed again.
    """
    if samples == 0:
        return Pass(0, 0, 0)  # it does not run
    layers, tables = len(part.layers), blocks.positions(layout)
    kept_bytes = size(layout, kept(layout, part)[len(tables) :], samples)
    half = size(layout, blocks.halves(), samples) if in_halves else 0
    end_half = size(layout, blocks.end_halves(), samples) if in_halves and part.last else 0
    moments = [kept_bytes]
    if layout.config.recompute == "block":
        before = size(layout, blocks.embedding(layout), samples) if part.first else 0
        each, again = size(layout, blocks.layer(layout), samples), size(layout, blocks.again(layout), samples)
        moments += [before + (i + 1) * each + again + (layers - 1 - i) * half + end_half for i in range(layers)]
    halves = layers * half + end_half
    return Pass(kept_bytes, max(*moments, halves), halves)


def peak(layout: Layout, stage: int, micro_batches: Iterable[int]) -> int:
    """The most bytes that are alive on a rank of a stage while a step runs.

    micro_batches: samples in each. A pipeline keeps each from its forward to its backward in every chunk, so that with
    equal ones, whole backwards and nothing computed again it is `peak_live` times the bytes of one; without a pipeline
    one is alive at a time. Between the halves of a backward it keeps what weight gradients are made of.
    """
    samples, chunks, schedule = list(micro_batches), layout.chunks(stage), layout.schedule
    tables = size(layout, blocks.positions(layout), 1)  # the same for all micro-batches
    if schedule is None:
        return tables + max(a_pass(layout, chunks[0], count, False).most for count in set(samples))
    passes = {}
    for chunk, part in enumerate(chunks):
        # As in the executor: nobody waits for the gradient of the model's input, and a compiled layer has no halves.
        later = schedule.splits_backward or not (part.first or layout.config.compile)
        passes |= {(chunk, count): a_pass(layout, part, count, later) for count in set(samples)}
    alive = most = 0
    for op in schedule.orders[stage]:
        each = passes[op.chunk, samples[op.micro_batch]]
        if op.kind == "F":
            alive += each.kept
            most = max(most, alive)
        if op.kind == "B":
            most = max(most, alive - each.kept + each.most)
            alive += each.halves - each.kept
        if op.kind == schedule.last_kind:
            alive -= each.halves
    return tables + most
