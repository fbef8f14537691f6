"""Ring reduce-scatter: the solution, as it stands in minidist.comm.algorithms.ring.

Every link of the ring is busy in every round. A rank sends each part except its own once, which is (size - 1) / size
of the tensor for any number of ranks; no reduce-scatter can send less. Each rank adds its local values to the part
that arrives and sends it on in the next round, so part c is summed in the order c + 1, c + 2, ..., c.

A round starts its send and its receive together. If every rank sent first and then received, all would block in the
send.

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
