"""Round the ring: reduce-scatter: the solution, as it stands in minidist.comm.algorithms.ring.

Every link of the ring is busy in every round and no byte travels twice: a rank sends each part but its own once,
which is (size - 1) / size of the row, whatever the number of ranks. Nobody who reduces and scatters can send less.
What arrives is added to this rank's share and leaves in the next round, so the sum of part c is taken in the order c
+ 1, c + 2, ..., c.

Send and receive of a round are started together: if every rank first sent and then received, all would wait for a
receiver.

Usual wrong answers:
* the last round is missing
* adds, whatever is asked
* sums are put into the list, and the row that its views were of keeps what it had
* the package's own ring
* the same number, whatever is added
* every part goes straight to the rank that completes it
* takes every part for as long as the first
* completes the part after its own
* what arrives is handed on without this rank's share
* the fourth rank forgets its own share
* rank 0 begins a round, and every other rank sends when it has received
* the library's all-reduce
* all parts travel in every round
* zeros
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import exchange, reduce_into
from minidist.comm.group import Group


def ring_reduce(parts: list[Tensor], group: Group, op: str) -> None:
    """Reduce-scatter in place: `parts[rank]` ends up fully reduced on this rank, the other parts hold partial results.

    parts: one view per rank, which together cover the tensor; the same lengths on every rank.
    """
    size, rank = group.size, group.rank
    scratch = parts[0].new_empty(max(part.numel() for part in parts))
    for step in range(size - 1):
        leaving, staying = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        arriving = scratch[: staying.numel()]
        exchange(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        reduce_into(staying, arriving, op)  # sent on in the next round; after the last, the result of this rank
