"""Ring reduce-scatter.

Write the first half of the ring: partial sums of chunks go round, and each rank adds its values, until rank r has
chunk r complete. Then write the collective reduce_scatter, which leaves its input unchanged.

chunks: one view per rank of the same flat tensor, with equal lengths on all ranks; lengths may differ by chunk and be
0. After ring_reduce chunks[rank] is reduced over all ranks; the others may hold anything. input: (size * n, ...),
contiguous; output: (n, ...). op: "sum", "mean", "max", "min", "product"; ring_reduce only adds for a mean.
Example: 3 ranks, whose inputs are [1, 2, 3], [10, 20, 30] and [100, 200, 300] in float64.
    reduce_scatter writes [111.0], [222.0] and [333.0] into the outputs; with op "mean" [37.0], [74.0] and [111.0]
    chunk 0 is summed on ranks 1, 2 and 0, in this order: 10, 110, 111

Checked: results for equal, unequal and empty chunks and every reduction, dtype and group; that ranks send only to
neighbours, all at the same time, and each chunk but its own once. The ring may run in either direction, or in both.

You may call:
    exchange(group, send=[(tensor, peer), ...], recv=[(tensor, peer), ...])   one round; peers are group ranks
    reduce_into(into, other, op)   overwrites `into` with the reduction of both; a mean only adds
    split_chunks(flat, size)   list of `size` consecutive views, whose lengths differ by at most 1
    flat_view(tensor)   a view of shape (n,); ValueError if the tensor is not contiguous
    divide_mean(total, op, size)   divides `total` in place by `size` if op is "mean"; otherwise does nothing
    check_reduce_op(op, tensor.dtype)   ValueError if there is no such reduction, or for a mean of integers
    check_shard_sizes(name, full=input, shard=output, group=group)   ValueError if the sizes do not fit

Check it with: python -m exercises check ring_reduce_scatter

Stub 1e775e0c.
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import (
    check_reduce_op,
    divide_mean,
    exchange,
    flat_view,
    reduce_into,
    split_chunks,
)
from minidist.comm.collectives import check_shard_sizes
from minidist.comm.group import Group


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: reduce `input` (size * n, ...), unchanged; `output` (n, ...) gets shard `rank` of the result."""
    raise NotImplementedError("reduce a copy of `input`, and copy this rank's chunk to `output`")


def ring_reduce(chunks: list[Tensor], group: Group, op: str) -> None:
    """Collective: reduce-scatter in place; `chunks[rank]` ends up fully reduced, all other chunks partially reduced.

    chunks: the tensor split into one view per rank, with the same lengths on every rank. op "mean" only adds.
    """
    raise NotImplementedError("send chunks round the ring and add this rank's values to them")
