"""Ring all-gather: the solution, as it stands in minidist.comm.algorithms.ring.

Each chunk goes round the ring once, from neighbour to neighbour, and stops on the rank before its origin. Each rank
sends (size - 1) / size of the tensor. Sending one's own chunk directly to every other rank takes as many bytes, but
not on a ring topology: between ranks that are not neighbours the same links carry a chunk several times, and the
messages of all ranks arrive at one receiver at once.

Usual wrong answers:
* the last round is missing
* sends all chunks in every round
* stores a received chunk in the list, not in the tensor that the list's views belong to
* the package's own ring
* the same number everywhere
* takes the ranks of the world for those of the group
* sends in float32, whatever the dtype of the input
* the fourth rank overwrites the second chunk with the first
* rank 0 starts a round, and every other rank sends only after it has received
* sends its own chunk in every round
* all_gather does not copy its own input into the output
* one of the library's broadcasts per chunk
* treats every chunk as if it had the length of the shortest
* sends each chunk directly to every other rank
* zeros
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import exchange, flat_view, split_chunks
from minidist.comm.collectives import check_shard_sizes
from minidist.comm.group import Group


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Collective: concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...)."""
    check_shard_sizes("all_gather", full=output, shard=input, group=group)
    chunks = split_chunks(flat_view(output), group.size)
    chunks[group.rank].copy_(flat_view(input))
    ring_gather(chunks, group)


def ring_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: all-gather in place; each rank's `chunks[rank]` goes round the ring until all have all chunks."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        exchange(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
