"""Which parameters are gathered together in stage 3, and how often; how long rows are in stage 2. Without torch."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

ROOT = -1  # in no block

# Parameters of a layer's modules. One that hangs on the layer itself may be used outside of it.
_IN_A_BLOCK = re.compile(r"model\.layers\.(\d+)\..+\.")


def block_of(name: str) -> int:
    """The index of the layer whose block a parameter is gathered with, or ROOT."""
    found = _IN_A_BLOCK.match(name)
    return int(found[1]) if found else ROOT


def transient_buffer_limit(sizes: Mapping[str, int], limit: int) -> int:
    """The upper size of a row of gradients that is there only while it is sent: that of the largest block.

    Larger rows would hold back what stage 2 saves, and a block's gradients come together. sizes: bytes of each
    parameter; limit: of a bucket, which a row never passes.
    """
    blocks: Counter[int] = Counter()
    for name, size in sizes.items():
        blocks[block_of(name)] += size
    del blocks[ROOT]
    return min(limit, max(blocks.values(), default=limit))


def gathers(
    passes: Iterable[tuple[str, int]],
    layers: Sequence[range],
    ends: Mapping[int, tuple[bool, bool]],
    keep: bool,
) -> Counter[int]:
    """How often each block, and ROOT, is gathered while a stage runs these passes.

    passes: ("F" or "B" or "end" of a backward, chunk). layers: of each chunk. ends: whether a chunk has the embedding,
    and whether it has the head. keep: what comes last in forward stays until its backward is over.
    """
    there: set[int] = set()
    found: Counter[int] = Counter()
    in_backward = None

    def need(block: int) -> None:
        found[block] += block not in there
        there.add(block)

    for kind, chunk in passes:
        first, last = ends[chunk]
        if kind == "end":
            there.clear()
            in_backward = None
            continue
        if last or (first and kind == "F"):
            need(ROOT)
        if kind == "F":
            for block in layers[chunk]:
                need(block)
                if not (keep and last and block == layers[chunk][-1]):
                    there.discard(block)
            if not (keep and last):
                there.discard(ROOT)
        else:
            for block in reversed(layers[chunk]):
                there.discard(in_backward)  # the one before is through
                need(block)
                in_backward = block
    return found
