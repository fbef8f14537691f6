"""Broadcast and reduce along a binomial tree.

Write a broadcast whose number of ranks with the tensor doubles in every round, and a reduce that runs the same tree
backwards. Both need ceil(log2(size)) rounds instead of the flat algorithm's size - 1.

tensor: contiguous, of any shape, also empty. src, dst: any group rank. After tree_broadcast all ranks have the tensor
of rank src. After tree_reduce rank dst has the reduction by `op` over all ranks; the tensors of the others may change.
Example: 6 ranks, src 0. These ranks send in each round of one possible tree:
    round 1: 0 to 1; round 2: 0 to 2, 1 to 3; round 3: 0 to 4, 1 to 5
    if rank r has [r + 1.0]: after the broadcast [1.0] everywhere; after the reduce [21.0] on rank 0, for a mean [3.5]

Checked: tensors on 1 to 7 ranks, for every root and reduction; that each rank but the root receives (broadcast) or
sends (reduce) the tensor once; the number of rounds; and every dtype, size and group, also groups that do not begin at
rank 0.

You may call:
    exchange(group, send=[(tensor, peer), ...], recv=[(tensor, peer), ...])   one round; peers are group ranks
    group.rank, group.size   this rank's index in the group, and the number of ranks in it
    flat_view(tensor)   a view of shape (n,); ValueError if the tensor is not contiguous
    check_reduce_op(op, tensor.dtype)   ValueError if there is no such reduction, or for a mean of integers
    reduce_into(into, other, op)   overwrites `into` with the reduction of both; a mean only adds
    divide_mean(total, op, size)   divides `total` in place by `size` if op is "mean"; otherwise does nothing

Check it with: python -m exercises check broadcast_tree

Stub f071f896.
"""

import torch
from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, exchange, flat_view, reduce_into
from minidist.comm.group import Group


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: overwrite `tensor` on group rank `dst` with the reduction over all ranks, along a binomial tree.

    On the other ranks `tensor` ends up partially reduced. Thakur et al. 2005, section 4.5.
    """
    raise NotImplementedError("reduce along the same tree, towards `dst`")


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with group rank `src`'s tensor, sent along a binomial tree."""
    raise NotImplementedError("broadcast along a tree: the number of ranks with the tensor doubles")
