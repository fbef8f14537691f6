"""Broadcast and reduce along a binomial tree: the solution, as it stands in minidist.comm.algorithms.root.

With the flat algorithm the root sends size - 1 messages in sequence while the other ranks are idle. In the tree every
rank that has the tensor sends it, so their number doubles in each round, and ceil(log2(size)) rounds suffice. This is
optimal if each rank sends one message at a time.

Places are relative to the root, so any rank can be the root. If the number of ranks is not a power of two, some ranks
have no partner in the last round: their place plus the distance is not below size.

Usual wrong answers:
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
* halves a mean at each level of the tree, which is right for powers of two only
* reduces to rank 0, whatever `dst`
* broadcasts from rank 0, whatever the root
* sends every message twice
* zeros, whatever the root's tensor
"""

import torch
from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, exchange, flat_view, reduce_into
from minidist.comm.group import Group


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: overwrite `tensor` on group rank `dst` with the reduction over all ranks, along a binomial tree.

    On the other ranks `tensor` ends up partially reduced. Thakur et al. 2005, section 4.5.
    """
    check_reduce_op(op, tensor.dtype)
    buffer, size = flat_view(tensor), group.size
    arriving = torch.empty_like(buffer)
    place = (group.rank - dst) % size
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if distance <= place < 2 * distance:
            exchange(group, send=[(buffer, (group.rank - distance) % size)])
        elif place < distance and place + distance < size:
            exchange(group, recv=[(arriving, (group.rank + distance) % size)])
            reduce_into(buffer, arriving, op)
        distance //= 2
    if place == 0:
        divide_mean(buffer, op, size)


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with group rank `src`'s tensor, sent along a binomial tree."""
    buffer, size = flat_view(tensor), group.size
    place = (group.rank - src) % size  # the root is at place 0
    distance = 1
    while distance < size:  # places below `distance` have the tensor
        if place < distance and place + distance < size:
            exchange(group, send=[(buffer, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            exchange(group, recv=[(buffer, (group.rank - distance) % size)])
        distance *= 2
