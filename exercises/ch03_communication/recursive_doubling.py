"""Recursive doubling.

Write the all-reduce with the fewest rounds: in each round two ranks exchange their full partial sums and add them. It
must work on any number of ranks, of which the largest power of two is active and the others are folded.

tensor: contiguous, of any shape, also empty; overwritten with the reduction on every rank. Returns None.
op: "sum", "mean", "max", "min" or "product"; a mean is the sum over all ranks, divided once by the group's size.
Example: 6 ranks with the tensors [1.0], [2.0], ... [6.0]. Active are ranks 0, 2, 4 and 5, with the indices 0, 1, 2 and
3.
    folded: 0 has 1 + 2 = 3, 2 has 3 + 4 = 7, 4 has 5, 5 has 6
    distance 1: indices 0 and 1 have 10, indices 2 and 3 have 11; distance 2: all four have 21; unfolded: all six

Checked: values for every reduction, dtype, size and group on 1 to 7 ranks; that all ranks have the same bits; and that
an active rank exchanges its tensor once with each active rank at distance 1, 2, 4, ...

You may call:
    PowerOfTwoRanks(group.size)   `active` below, with active.count active ranks
    active.is_folded(rank), active.index(rank), active.rank(index)   bool; the rank's index; the group rank of an index
    fold_extra_ranks(buffer, active, group, op)   reduces each folded rank's buffer into the active rank's before it
    unfold_extra_ranks(buffer, active, group)   sends the result back to the folded ranks
    exchange(group, send=[(tensor, peer), ...], recv=[(tensor, peer), ...])   one round; peers are group ranks
    reduce_into(into, other, op)   overwrites `into` with the reduction of both; a mean only adds
    flat_view(tensor)   a view of shape (n,); ValueError if the tensor is not contiguous
    divide_mean(total, op, size)   divides `total` in place by `size` if op is "mean"; otherwise does nothing
    check_reduce_op(op, tensor.dtype)   ValueError if there is no such reduction, or for a mean of integers

Check it with: python -m exercises check recursive_doubling

Stub 391e6ee7.
"""

import torch
from torch import Tensor

from minidist.comm.algorithms.halving import fold_extra_ranks, unfold_extra_ranks
from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, exchange, flat_view, reduce_into
from minidist.comm.group import Group
from minidist.comm.power_of_two import PowerOfTwoRanks


def doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place; in each round partners exchange full tensors and add them.

    Both partners add the same two numbers, and a + b = b + a bit for bit, so all ranks get identical results. Unlike in
    the ring, the order of additions does not depend on an element's offset in the tensor.
    """
    raise NotImplementedError("fold, exchange with the partners at distance 1, 2, 4, ..., unfold")
