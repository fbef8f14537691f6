"""Ulysses: during attention the ranks shard the heads instead of the sequence.

Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1). One all-to-all turns every head's part of the
sequence into the whole sequence of some heads, attention runs as in one process, and a second all-to-all turns the
result back. A rank sends (n - 1) / n of its tensors, however many ranks there are, where the ring sends n - 1 times its
keys and values. But there cannot be more ranks than heads, and nothing is computed while the messages are in flight.

The collective is inside, so a block compiles with `fullgraph=True`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.context.layout import rank_positions

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, attend: Attend, group: Group, layout: str = "contiguous"
) -> Tensor:
    """Collective: return attention of this rank's queries over the keys of the whole sequence, in the shape of query.

    query: (b, heads, s / ranks, d). key, value: (b, kv_heads, s / ranks, d); consecutive query heads attend to the same
    key head. attend: computes attention locally; called with query, key and value of whole sequences in order, for some
    of the heads. group: the n ranks that shard the sequence. layout: which positions each rank has, "contiguous" or
    "zigzag". If n does not divide kv_heads, key and value heads are repeated before they are sent: n / gcd(n, kv_heads)
    times the bytes. Raises ValueError if n does not divide the query heads.
    """
    size = group.size
    heads = query.shape[1]
    if heads % size:
        raise ValueError(f"{heads} query heads cannot be shared equally by {size} ranks: use ring attention")
    repeats = size // math.gcd(size, key.shape[1])
    # Query heads divide by the key heads and by the ranks, so by the key heads thus repeated.
    parts = [query, *(x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))]
    shares = [x.shape[1] // size for x in parts]
    # Rank i's heads of all three become part i of one message.
    sent = torch.cat([x.unflatten(1, (size, -1)) for x in parts], 2).movedim(1, 0)  # (n, b, share, s / n, d)
    received = ops.all_to_all(sent, group.key)  # part i: my heads at the positions of rank i
    mine = attend(*_sort_positions(_join_sequence(received), layout, size).split(shares, 1))  # (b, heads / n, s, d)
    back = ops.all_to_all(_split_sequence(_unsort_positions(mine, layout, size), size), group.key)
    return back.movedim(0, 1).flatten(1, 2)


def _join_sequence(parts: Tensor) -> Tensor:
    """Concatenate the ranks' parts along the sequence: (n, b, heads, s / n, d) -> (b, heads, s, d)."""
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _split_sequence(whole: Tensor, size: int) -> Tensor:
    """Split the sequence into the ranks' parts, the inverse of `_join_sequence`. size: number of ranks."""
    return whole.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)


def _sort_positions(x: Tensor, layout: str, size: int) -> Tensor:
    """Put x (b, heads, s, d), which has the ranks' positions one after the other, in the order of the sequence."""
    return x if layout == "contiguous" else x.index_select(2, _positions_by_rank(x, layout, size).argsort())


def _unsort_positions(x: Tensor, layout: str, size: int) -> Tensor:
    """Put x, in the order of the sequence, back into rank order: the inverse of `_sort_positions`."""
    return x if layout == "contiguous" else x.index_select(2, _positions_by_rank(x, layout, size))


def _positions_by_rank(x: Tensor, layout: str, size: int) -> Tensor:
    """Return the positions of all ranks, one rank after the other, (s,) int64."""
    return torch.cat([rank_positions(layout, x.shape[2], size, rank) for rank in range(size)]).to(x.device)
