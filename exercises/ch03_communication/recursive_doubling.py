"""Recursive doubling.

Write the missing lines of doubling_all_reduce; its docstring specifies the result.
You may call: exchange, reduce_into, active.rank, active.index, torch.empty_like, send, recv.
Check it with: python -m exercises check recursive_doubling

Stub cad15e66.
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
    check_reduce_op(op, tensor.dtype)
    buffer, active = flat_view(tensor), PowerOfTwoRanks(group.size)
    fold_extra_ranks(buffer, active, group, op)
    if not active.is_folded(group.rank):
        raise NotImplementedError("exchange tensors with the partners at distance 1, 2, 4, ... and reduce")
        divide_mean(buffer, op, group.size)
    unfold_extra_ranks(buffer, active, group)
