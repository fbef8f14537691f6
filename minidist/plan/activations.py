"""Bytes kept from forward to backward: of a micro-batch in a part of the model, and at most at one time."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from minidist.plan import blocks
from minidist.plan.blocks import COMPUTE, PARAMETER, Saved
from minidist.plan.layout import BYTES, Layout, Part
from minidist.plan.shapes import Sizes


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


def peak(layout: Layout, stage: int, micro_batches: Iterable[int]) -> int:
    """The most bytes that are alive on a rank of a stage while a step runs.

    micro_batches: samples in each. A pipeline keeps each from its forward to its last backward in every chunk, so that
    with equal ones it is `peak_live` times the bytes of one; without a pipeline one is alive at a time.

    Where backward comes in halves, a micro-batch counts whole until its weight half: it holds less by then, the inputs
    of the projections and the gradients of what they gave.
    """
    samples, chunks = list(micro_batches), layout.chunks(stage)
    tables = blocks.positions(layout)  # the same for all micro-batches
    bytes_of = {
        (chunk, count): size(layout, kept(layout, part)[len(tables) :], count)
        for chunk, part in enumerate(chunks)
        for count in set(samples)
    }
    if layout.schedule is None:
        return size(layout, tables, 1) + max(bytes_of.values())
    alive = most = 0
    for op in layout.schedule.orders[stage]:
        each = bytes_of[op.chunk, samples[op.micro_batch]]
        if op.kind == "F":
            alive += each
            most = max(most, alive)
        elif op.kind == layout.schedule.last_kind:
            alive -= each
    return size(layout, tables, 1) + most
