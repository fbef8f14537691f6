"""Bandwidth-optimal all-reduce.

Warm-up after the two halves of the ring: put them together to an all-reduce. Every rank ends with the reduction over
all ranks, in the tensor that it passed, after sending 2 (size - 1) / size of the tensor.

tensor: contiguous, of any shape: its size need not be divisible by the number of ranks, and may be smaller or 0.
op: "sum", "mean", "max", "min" or "product"; a mean is the sum, divided once. Returns None.
Example: 2 ranks with the tensors [1.0, 2.0, 3.0] and [10.0, 20.0, 30.0].
    afterwards both tensors are [11.0, 22.0, 33.0]; with op "mean" [5.5, 11.0, 16.5], with "max" [10.0, 20.0, 30.0]
    the chunks have 2 elements and 1, so each rank sends 3 elements in two messages

Checked: values for every reduction, dtype, size, shape and group; that the ranks' results are equal bit by bit; the
elements that all ranks together send, that they send equally much, and only to neighbours (in one direction or both).

You may call:
    ring_reduce(chunks, group, op)   reduce-scatter in place: chunks[rank] ends reduced; a mean is only added up
    ring_gather(chunks, group)   all-gather in place: chunks[rank] of every rank reaches all ranks
    split_chunks(flat, size)   list of `size` consecutive views, whose lengths differ by at most 1
    flat_view(tensor)   a view of shape (n,); ValueError if the tensor is not contiguous
    divide_mean(total, op, size)   divides `total` in place by `size` if op is "mean"; otherwise does nothing
    check_reduce_op(op, tensor.dtype)   ValueError if there is no such reduction, or for a mean of integers
    exchange(group, send=[(tensor, peer), ...], recv=[(tensor, peer), ...])   one round; peers are group ranks

Check it with: python -m exercises check ring_all_reduce

Stub 584170a4.
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, flat_view, split_chunks
from minidist.comm.algorithms.ring import ring_gather, ring_reduce
from minidist.comm.group import Group


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place by ring reduce-scatter, then ring all-gather.

    As in the paper, rank r completes chunk r + 1, so the list of chunks is rotated. Chunk c is summed in the order of
    ranks c, c + 1, ..., c - 1 (modulo size) and then copied to all ranks, so all get identical results; but the order
    of additions depends on an element's offset in the tensor.
    """
    raise NotImplementedError("split the tensor into chunks, reduce-scatter, divide for a mean, all-gather")
