"""Ring reduce-scatter: the solution, as it stands in minidist.comm.algorithms.ring.

Every link of the ring is busy in every round. A rank sends each chunk except its own once, which is (size - 1) / size
of the tensor for any number of ranks; no reduce-scatter can send less. Each rank adds its local values to the chunk
that arrives and sends it on in the next round, so chunk c is summed in the order c + 1, c + 2, ..., c.

A round starts its send and its receive together. If every rank sent first and then received, all would block in the
send.

Usual wrong answers:
* the last round is missing
* sums, whatever `op` is
* stores the sums in the list, not in the tensor that the list's views belong to
* the package's own ring
* the same number, whatever the inputs
* every chunk is sent directly to the rank that completes it
* reduce_scatter sums into its input
* treats every chunk as if it had the length of the first
* reduce_scatter does not divide a mean
* completes the chunk after its own
* sends a received chunk on without adding this rank's values
* the fourth rank does not add its own values
* rank 0 starts a round, and every other rank sends only after it has received
* copies the flat chunk into an output of more than one dimension
* copies the chunk of the next rank into the output
* the library's all-reduce
* ring_reduce divides for a mean, which is left to its callers
* sums in float32, whatever the dtype of the input
* sends all chunks in every round
* zeros
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
    check_shard_sizes("reduce_scatter", full=input, shard=output, group=group)
    check_reduce_op(op, input.dtype)
    chunks = split_chunks(flat_view(input).clone(), group.size)
    ring_reduce(chunks, group, op)
    divide_mean(chunks[group.rank], op, group.size)
    flat_view(output).copy_(chunks[group.rank])


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
