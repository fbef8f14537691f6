"""The ring all-reduce: the solution, as it stands in minidist.simple.collectives.

Every link of the ring is busy in every round. In each half a rank sends all chunks but one, (size - 1) / size of the
tensor, and no all-reduce can send less than the two together. The bytes hardly grow with the number of ranks. The
rounds, 2 (size - 1), do: the ring is for large tensors.

Each chunk is summed on one path, in one order, and then copied, so all ranks get identical bits. Replicas that sum in
different orders drift apart. If the size is not divisible by the number of ranks, the chunks differ by one element;
an implementation that drops the remainder passes every test with round numbers.

A round starts its send and its receive together. If every rank sent first and then received, all would block in the
send.

Usual wrong answers:
* the package's own ring
* the same number, whatever the inputs
* reduces only as many elements as the first chunk has
* odd ranks send only after they have received: half of the links wait
* sums in float32, whatever the dtype of the tensor
* every rank has only one chunk of the sum
* a rank sends only after it has received: one link at a time is busy
* one chunk holds the full tensor and goes round twice; the others are empty
* the first half always adds
* sends its own chunk in every round of the second half
* full tensors go round, and every rank adds them in an order of its own
* pads the tensor to a multiple of the number of ranks, and sends the padding as well
* the library's all-reduce
* the last chunk has the full remainder, so that the ranks do not send equally much
* the remainder is not summed
* sends in half precision, which the small integers of most tests do not show
* the third rank forgets the last chunk that it receives
* in the second half each rank sends its chunk to every other rank itself
* `reshape` copies a tensor that is not contiguous, and the result is lost
* splits the tensor by the number of all ranks, although the group has some of them only
* rank r completes chunk r + 1 in the first half
* zeros
* sets the other chunks to zero by a product, which leaves NaN, and adds what arrives
"""

from torch import Tensor

from minidist.comm import Group
from minidist.simple.collectives import exchange


def ring_reduce_scatter(chunks: list[Tensor], group: Group, op: str = "sum") -> None:
    """Collective: reduce in place; afterwards `chunks[rank]` is fully reduced, the others partially.

    chunks: one per rank, of the same lengths on all ranks. Chunk c starts on the rank after c, in the direction in
    which it goes round, and every rank that it passes adds its own values.
    """
    size, rank = group.size, group.rank
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - 1 - step) % size], chunks[(rank - 2 - step) % size]
        exchange(group, send=(outgoing, (rank + 1) % size), recv=(incoming, (rank - 1) % size), op=op)


def ring_all_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: each rank's `chunks[rank]` goes round the ring, until all ranks have all chunks."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        exchange(group, send=(outgoing, (rank + 1) % size), recv=(incoming, (rank - 1) % size))


def ring_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by reduce-scatter and all-gather on a ring.

    All ranks get the same bits, as each chunk is reduced once and then copied. The order of the additions depends on
    the chunk.
    """
    chunks = list(tensor.view(-1).tensor_split(group.size))  # lengths differ by at most one, and may be 0
    ring_reduce_scatter(chunks, group, op)
    ring_all_gather(chunks, group)
