"""Ring all-gather: the solution, as it stands in minidist.comm.algorithms.ring.

Each part goes round the ring once, from neighbour to neighbour, and stops on the rank before its origin. Each rank
sends (size - 1) / size of the tensor. Sending one's own part directly to every other rank takes as many bytes, but
not on a ring topology: between ranks that are not neighbours the same links carry a part several times, and the
messages of all ranks arrive at one receiver at once.

Usual wrong answers:
* the last round is missing
* the whole row travels in every round
* what arrives is put into the list, and not into the row that its views were of
* the package's own ring
* the same number everywhere
* the fourth rank puts the first part in the place of the second
* rank 0 begins a round, and every other rank sends when it has received
* sends its own part in every round
* a library's broadcast for every part
* takes every part for as long as the shortest
* each part goes straight to everybody
* zeros
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import exchange
from minidist.comm.group import Group


def ring_gather(parts: list[Tensor], group: Group) -> None:
    """All-gather in place: every rank's `parts[rank]` goes round the ring until each rank has all parts."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        exchange(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
