"""Ring all-gather.

Write the second half of the ring: each rank has one chunk, and after size - 1 rounds every rank has all of them. Then
write the collective all_gather, which is one call of it.

chunks: one view per rank of the same flat tensor, with equal lengths on all ranks; lengths may differ by chunk and be
0. Before ring_gather only chunks[rank] counts; afterwards all chunks are in the tensor of which they are views. input:
(n, ...), contiguous, not changed; output: (size * n, ...), in the order of the ranks.
Example: 3 ranks with the inputs [1.0, 2.0], [3.0, 4.0] and [5.0, 6.0].
    all_gather writes [1, 2, 3, 4, 5, 6] into the output of every rank; each rank sends 4 elements to its neighbour

Checked: results for equal, unequal and empty chunks and every dtype, size and group; that ranks send only to
neighbours, all at the same time, and each chunk once. The ring may run in either direction, or in both.

You may call:
    exchange(group, send=[(tensor, peer), ...], recv=[(tensor, peer), ...])   one round; peers are group ranks
    split_chunks(flat, size)   list of `size` consecutive views, whose lengths differ by at most 1
    flat_view(tensor)   a view of shape (n,); ValueError if the tensor is not contiguous
    check_shard_sizes(name, full=output, shard=input, group=group)   ValueError if the sizes do not fit

Check it with: python -m exercises check ring_all_gather

Stub d1ba7f1c.
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import exchange, flat_view, split_chunks
from minidist.comm.collectives import check_shard_sizes
from minidist.comm.group import Group


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Collective: concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...)."""
    raise NotImplementedError("copy `input` into its place in `output`, and gather the rest")


def ring_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: all-gather in place; each rank's `chunks[rank]` goes round the ring until all have all chunks."""
    raise NotImplementedError("send on the chunk received in the previous round")
