"""The ring all-reduce.

Write the all-reduce that sends the fewest bytes, in its two halves. In ring_reduce_scatter partial sums of chunks go
round the ring, and each rank adds its values; in ring_all_gather the complete chunks go round; ring_all_reduce splits a
tensor and calls both. The trainer runs it for `--comm.algorithm ring`.

chunks: one view per rank of the same flat tensor, of the same lengths on all ranks; lengths may differ by chunk and be
0. After ring_reduce_scatter chunks[rank] is reduced over all ranks by `op` ("sum", "max", "min" or "product"); the
others may hold anything. Before ring_all_gather only chunks[rank] counts; afterwards all chunks are right. tensor:
contiguous, of any shape and size, also smaller than the number of ranks; reduced in place. All three return None.
Example: 3 ranks whose chunks are 1, 2, 3 (rank 0), 10, 20, 30 (rank 1) and 100, 200, 300 (rank 2), one element each.
    ring_reduce_scatter leaves 111 in chunks[0] of rank 0, 222 in chunks[1] of rank 1 and 333 in chunks[2] of rank 2;
    chunk 0 is summed on ranks 1, 2 and 0, in this order: 10, 110, 111
    ring_all_gather then leaves 111, 222, 333 on every rank; each rank has sent 2 + 2 chunks to its neighbour

Checked: each half with equal, unequal and empty chunks, and every op; that each rank sends to neighbours only (round
the ring one way, or half of the elements each way), at the same time as the others, and each chunk but one once; the
all-reduce for every op, dtype, shape, size and group; that all ranks get the same bits; the elements that all ranks
together send, and that they send equally much.

You may call:
    exchange(group, send=(tensor, peer), recv=(tensor, peer), op=op)   one round; each of the three may be left out;
        peers are group ranks; what arrives overwrites recv's tensor or, with op, is reduced into it; sends and receives
        at once, and skips empty tensors
    group.rank, group.size   this rank's index in the group, and the number of ranks in it
    tensor.view(-1), tensor.tensor_split(n)   views: one of shape (numel,); n of them whose lengths differ by at most 1

Check it with: python -m exercises check ring_all_reduce

Stub 15c9614d.
"""

from torch import Tensor

from minidist.comm import Group
from minidist.simple.collectives import exchange


def ring_reduce_scatter(chunks: list[Tensor], group: Group, op: str = "sum") -> None:
    """Collective: reduce in place; afterwards `chunks[rank]` is fully reduced, the others partially.

    chunks: one per rank, of the same lengths on all ranks. Chunk c starts on the rank after c, in the direction in
    which it goes round, and every rank that it passes adds its own values.
    """
    raise NotImplementedError("send chunks round the ring and reduce this rank's values into them")


def ring_all_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: each rank's `chunks[rank]` goes round the ring, until all ranks have all chunks."""
    raise NotImplementedError("send on the chunk received in the previous round")


def ring_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by reduce-scatter and all-gather on a ring.

    All ranks get the same bits, as each chunk is reduced once and then copied. The order of the additions depends on
    the chunk.
    """
    raise NotImplementedError("split the tensor into one chunk per rank, reduce-scatter, all-gather")
