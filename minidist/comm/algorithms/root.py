"""Broadcast and reduce between all ranks and one root, and the parameter-server step built from both.

flat   the root exchanges a message with each other rank: `size - 1` messages in sequence through the root's link
tree   a binomial tree: in each round every rank that has the tensor sends it to one that has not, so their number
       doubles and `ceil(log2(size))` rounds suffice. Thakur et al. 2005, section 4.2; Chan et al. 2007 (MST broadcast)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, exchange, flat_view, reduce_into
from minidist.comm.group import Group


def flat_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with group rank `src`'s tensor, which `src` sends to every other rank."""
    buffer = flat_view(tensor)
    if group.rank == src:
        exchange(group, send=[(buffer, rank) for rank in range(group.size) if rank != src])
    else:
        exchange(group, recv=[(buffer, src)])


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


def flat_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: overwrite `tensor` on group rank `dst` with the reduction over all ranks; no other tensor changes.

    Rank `dst` allocates one more tensor, into which it receives the other ranks' tensors in rank order.
    """
    check_reduce_op(op, tensor.dtype)
    buffer = flat_view(tensor)
    if group.rank != dst:
        exchange(group, send=[(buffer, dst)])
        return
    arriving = torch.empty_like(buffer)
    for rank in range(group.size):
        if rank != dst:
            exchange(group, recv=[(arriving, rank)])
            reduce_into(buffer, arriving, op)
    divide_mean(buffer, op, group.size)


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


def parameter_server_step(
    parameters: Tensor,
    gradient: Tensor,
    update: Callable[[Tensor, Tensor], None],
    group: Group,
    root: int = 0,
    op: str = "sum",
) -> None:
    """Collective: reduce the gradients to rank `root`, update the parameters there, and broadcast them to all ranks.

    update: called on the root only, with its `parameters` and the reduced `gradient`; changes the parameters in place.
    root: group rank. op: the reduction of the gradients. `gradient` may change on the root, and does not elsewhere.
    Only the root needs optimizer states, but all bytes of a step pass through its one link. This is the
    parameter server of Li et al. 2014 with a single server.
    """
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
