"""Recursive doubling: the solution, as it stands in minidist.comm.algorithms.halving.

The number of ranks in the partial sum doubles in each round, so log2(size) rounds suffice, half as many as up and
down a tree. Every round sends the full tensor. For small tensors, where latency dominates, no algorithm is faster.

Both partners add the same two values, and a + b equals b + a bit for bit, so all ranks end with identical bits. If
the number of ranks is not a power of two, the extra ranks are folded: they send their tensor at the start and receive
the result at the end.

Usual wrong answers:
* sums, whatever `op` is
* the package's own algorithm
* the same number, whatever the inputs
* distances 1, 2, 3 instead of 1, 2, 4
* divides before the sum, so that small numbers become zero
* sums in float32, whatever the dtype of the tensor
* uses the index of an active rank as its rank
* wrong only on the fourth rank
* divides a mean by the number of active ranks
* the folded ranks never get the result
* partners at distance 1 only
* partner `rank ^ distance`, if there is such a rank: on 3 ranks rank 2 never gets the tensor of rank 1
* the library's all-reduce
* the active ranks send full tensors round a ring
* keeps its scratch tensor from the first call, and adds only its part of a longer one
* replaces this rank's tensor with the partner's instead of adding it
* `reshape` copies a tensor that is not contiguous, and the result is lost
* zeros
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
        arriving, distance = torch.empty_like(buffer), 1
        while distance < active.count:
            peer = active.rank(active.index(group.rank) ^ distance)
            exchange(group, send=[(buffer, peer)], recv=[(arriving, peer)])
            reduce_into(buffer, arriving, op)
            distance *= 2
        divide_mean(buffer, op, group.size)
    unfold_extra_ranks(buffer, active, group)
