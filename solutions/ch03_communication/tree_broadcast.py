"""Broadcast and reduce along a binomial tree: the solution, as it stands in minidist.simple.collectives.

If the root sends the tensor to every rank itself, it sends size - 1 messages in sequence while the other ranks are
idle. In the tree every rank that has the tensor sends it, so their number doubles in each round, and ceil(log2(size))
rounds suffice. This is optimal if each rank sends one message at a time.

Places are relative to the root, so any rank can be the root. If the number of ranks is not a power of two, some ranks
have no partner in the last round: their place plus the distance is not below size.

Usual wrong answers:
* returns the tensor as well, so that its caller may take it for a new one
* each rank sends the tensor to the next: size - 1 rounds
* the package's own tree
* the same numbers, whatever the root's tensor
* the root sends the tensor to every rank itself
* sends in float32, whatever the dtype of the tensor
* sends before it has received the tensor
* wrong only on the last of four ranks
* the root sends to every second place, and each of these to its neighbour
* on 3 ranks the last rank receives nothing
* the library's broadcast
* the reduce adds, whatever `op` is
* the root receives every tensor itself, one after the other
* the reduce runs the rounds of the broadcast in the same order, so ranks pass their sums on before all have arrived
* reduces to rank 0, whatever `dst`
* broadcasts from rank 0, whatever the root
* sends every message twice
* zeros, whatever the root's tensor
"""

from torch import Tensor

from minidist.comm import Group
from minidist.simple.collectives import exchange


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: reduce all ranks' `tensor` into rank `dst`'s; the other ranks' end up partially reduced.

    The rounds of `tree_broadcast` in the opposite order, each with its senders and receivers exchanged.
    """
    size = group.size
    place = (group.rank - dst) % size
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if distance <= place < 2 * distance:
            exchange(group, send=(tensor, (group.rank - distance) % size))
        elif place < distance and place + distance < size:
            exchange(group, recv=(tensor, (group.rank + distance) % size), op=op)
        distance //= 2


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with rank `src`'s. In each round, every rank that has it sends it to one more."""
    size = group.size
    place = (group.rank - src) % size  # counted from the root
    distance = 1
    while distance < size:  # the places below `distance` have the tensor
        if place < distance and place + distance < size:
            exchange(group, send=(tensor, (group.rank + distance) % size))
        elif distance <= place < 2 * distance:
            exchange(group, recv=(tensor, (group.rank - distance) % size))
        distance *= 2
