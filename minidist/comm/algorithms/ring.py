"""Ring algorithms: every rank sends only to the next one, and the total number of bytes is minimal.

The tensor is split into one chunk per rank. In `size - 1` rounds the partial sums of all chunks go round the ring, and
each rank adds its local chunk to them: reduce-scatter. In `size - 1` more rounds the reduced chunks go round:
all-gather. The two in sequence are the bandwidth-optimal all-reduce: a rank sends 2 (size - 1) / size of the tensor.
Patarasuk and Yuan 2009, section 3; Thakur et al. 2005, sections 4.1 and 4.4.
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


def ring_reduce(chunks: list[Tensor], group: Group, op: str) -> None:
    """Collective: reduce-scatter in place; `chunks[rank]` ends up fully reduced, all other chunks partially reduced.

    chunks: the tensor split into one view per rank, with the same lengths on every rank. op "mean" only adds.
    """
    size, rank = group.size, group.rank
    scratch = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    for step in range(size - 1):
        leaving, staying = chunks[(rank - 1 - step) % size], chunks[(rank - 2 - step) % size]
        arriving = scratch[: staying.numel()]
        exchange(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        reduce_into(staying, arriving, op)  # sent on in the next round; after the last, the result of this rank


def ring_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: all-gather in place; each rank's `chunks[rank]` goes round the ring until all have all chunks."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        exchange(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: reduce `input` (size * n, ...), unchanged; `output` (n, ...) gets shard `rank` of the result."""
    check_shard_sizes("reduce_scatter", full=input, shard=output, group=group)
    check_reduce_op(op, input.dtype)
    chunks = split_chunks(flat_view(input).clone(), group.size)
    ring_reduce(chunks, group, op)
    divide_mean(chunks[group.rank], op, group.size)
    flat_view(output).copy_(chunks[group.rank])


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Collective: concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...)."""
    check_shard_sizes("all_gather", full=output, shard=input, group=group)
    chunks = split_chunks(flat_view(output), group.size)
    chunks[group.rank].copy_(flat_view(input))
    ring_gather(chunks, group)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place by ring reduce-scatter, then ring all-gather.

    As in the paper, rank r completes chunk r + 1, so the list of chunks is rotated. Chunk c is summed in the order of
    ranks c, c + 1, ..., c - 1 (modulo size) and then copied to all ranks, so all get identical results; but the order
    of additions depends on an element's offset in the tensor.
    """
    check_reduce_op(op, tensor.dtype)
    chunks = split_chunks(flat_view(tensor), group.size)
    chunks = chunks[1:] + chunks[:1]
    ring_reduce(chunks, group, op)
    divide_mean(chunks[group.rank], op, group.size)
    ring_gather(chunks, group)


def hierarchical_all_reduce(tensor: Tensor, intra_node: Group, inter_node: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place over all ranks of all nodes, for slow links between nodes.

    Reduce-scatter inside each node, all-reduce of the shards across nodes, all-gather inside each node. Across nodes a
    rank sends 2 (nodes - 1) / nodes of its shard: with m ranks per node, at most an m-th of what a ring over all ranks
    sends. Mikami et al. 2018 (2D-torus all-reduce).

    intra_node: the group of this node's ranks. inter_node: the group of one rank per node, those with this rank's index
    on their node. All nodes have equally many ranks.
    """
    check_reduce_op(op, tensor.dtype)
    chunks = split_chunks(flat_view(tensor), intra_node.size)
    shard = chunks[intra_node.rank]
    partial_op = "sum" if op == "mean" else op
    ring_reduce(chunks, intra_node, partial_op)
    all_reduce(shard, inter_node, partial_op)
    divide_mean(shard, op, intra_node.size * inter_node.size)
    ring_gather(chunks, intra_node)
