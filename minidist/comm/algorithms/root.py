"""Broadcast and reduce, from and to one root, and the central update that is made of both.

flat   the root talks to everybody itself: `size - 1` messages one after the other through its link
tree   a binomial tree: whoever has the tensor feeds one who has not, so those who have it double every round, and
       `ceil(log2(size))` rounds are enough. Thakur et al. 2005, section 4.2; Chan et al. 2007 (MST broadcast)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm.algorithms.rounds import check, combine, finish, row, together
from minidist.comm.group import Group


def flat_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Replace `tensor` on every rank by that of group rank `src`, which sends it to each of the others."""
    mine = row(tensor)
    if group.rank == src:
        together(group, send=[(mine, rank) for rank in range(group.size) if rank != src])
    else:
        together(group, recv=[(mine, src)])


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Replace `tensor` on every rank by that of group rank `src`, along a binomial tree."""
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size  # the root is at place 0
    distance = 1
    while distance < size:  # places below `distance` have the tensor
        if place < distance and place + distance < size:
            together(group, send=[(mine, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            together(group, recv=[(mine, (group.rank - distance) % size)])
        distance *= 2


def flat_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Reduce `tensor` into that of group rank `dst`; the other ranks' tensors stay as they are.

    The root adds in rank order (its own first) and needs memory for one more tensor.
    """
    check(op, tensor.dtype)
    mine = row(tensor)
    if group.rank != dst:
        together(group, send=[(mine, dst)])
        return
    arriving = torch.empty_like(mine)
    for rank in range(group.size):
        if rank != dst:
            together(group, recv=[(arriving, rank)])
            combine(mine, arriving, op)
    finish(mine, op, group.size)


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Reduce `tensor` into that of group rank `dst`, up the tree that a broadcast comes down.

    On other ranks the tensor is left holding what passed through: a partial result. Thakur et al. 2005, section 4.5.
    """
    check(op, tensor.dtype)
    mine, size = row(tensor), group.size
    arriving = torch.empty_like(mine)
    place = (group.rank - dst) % size
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if distance <= place < 2 * distance:
            together(group, send=[(mine, (group.rank - distance) % size)])
        elif place < distance and place + distance < size:
            together(group, recv=[(arriving, (group.rank + distance) % size)])
            combine(mine, arriving, op)
        distance //= 2
    if place == 0:
        finish(mine, op, size)


def central_update(
    parameters: Tensor,
    gradient: Tensor,
    update: Callable[[Tensor, Tensor], None],
    group: Group,
    root: int = 0,
    op: str = "sum",
) -> None:
    """One root collects the gradients, updates the parameters, and sends them to everybody.

    update: called on the root only, with its `parameters` and the reduced `gradient`; changes the parameters in place.
    Only the root needs the optimizer's state; in return all bytes of a step pass through its one link: the parameter
    server of Li et al. 2014, with one server. `gradient` is reduced in place on the root and unchanged elsewhere.
    """
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
