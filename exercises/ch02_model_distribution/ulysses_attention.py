"""Ulysses: attention sharded by heads.

Each of n ranks has some tokens of a sequence, with all heads. Exchange heads for tokens with an all-to-all, so that
each rank has all tokens of 1 / n of the heads; compute attention there, and exchange back.

sequence_to_heads: (b, heads, s / n, d) -> (b, heads / n, s, d): rank r gets the r-th of n equal parts of the heads,
with the tokens of rank 0 first, then those of rank 1, and so on. heads_to_sequence is its inverse. ulysses_attention:
query, (b, heads, s / n, d), and key and value, (b, kv_heads, s / n, d), of this rank's tokens; fp32 or fp64. kv_heads
divides heads, and consecutive query heads share a key head. It calls attend(query, key, value) once, with the tokens in
the order of their positions, and returns attention of this rank's queries, in the shape of query. layout: "contiguous"
or "zigzag". Raises ValueError, before it sends anything, if n does not divide heads. Autograd works through all three.
Example: 2 ranks, 4 tokens, 2 heads, d = 1, layout "zigzag": rank 0 has the positions 0 and 3, rank 1 has 1 and 2. The
    value of head h at position p is 10 h + p: [[0, 3], [10, 13]] on rank 0, [[1, 2], [11, 12]] on rank 1.
    sequence_to_heads gives [[0, 3, 1, 2]] on rank 0 and [[10, 13, 11, 12]] on rank 1; attend gets the values
    [[0, 1, 2, 3]] and [[10, 11, 12, 13]]. If all scores are equal, the results are [[0, 1.5], [10, 11.5]] on rank 0
    and [[0.5, 1], [10.5, 11]] on rank 1.

Checked: output and gradients on 1 to 4 ranks against one process in float64, for both layouts and 1, 2, 4 and 12 key
heads; both exchanges and their gradients; what attend gets; the ValueError; that forward and backward each make at most
four all-to-alls of a query's size and send nothing else; and float32, other strides and groups on 1 to 7 ranks.

You may call:
    ops.all_to_all(x, group.key)   sends part i of n along dimension 0 to rank i; returns the parts it receives, in rank
        order and in the shape of x; its backward is an all-to-all of the gradient
    Tensor.unflatten(dim, (n, -1))   dim as two dimensions; Tensor.movedim(from, to); Tensor.flatten(first, last)
    all_positions(layout, s / n, group)   (n, s / n) int64, row r the positions of rank r's tokens; Tensor.argsort()
    Tensor.repeat_interleave(times, dim)   each index `times` in succession; group.rank, group.size

Check it with: python -m exercises check ulysses_attention

Stub ca3b436e.
"""

from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.context.simple import all_positions


def sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """Collective: (b, heads, s / n, d) of this rank's tokens -> (b, heads / n, s, d), all tokens in rank order."""
    raise NotImplementedError("return all tokens of this rank's heads, in rank order")


def heads_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Collective: the inverse of `sequence_to_heads`, (b, heads / n, s, d) -> (b, heads, s / n, d)."""
    raise NotImplementedError("return all heads of this rank's tokens")


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, attend, group: Group, layout: str) -> Tensor:
    """Collective: return causal attention of this rank's queries over the whole sequence; arguments as in the fast one.

    attend: causal attention of whole sequences in order. Key and value heads are repeated as in `ring_attention`.
    Raises ValueError if n does not divide the number of query heads.
    """
    raise NotImplementedError("return attention of this rank's queries over the whole sequence")
