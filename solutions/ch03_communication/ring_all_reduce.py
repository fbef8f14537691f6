"""The all-reduce that is optimal in bytes: the solution, as it stands in minidist.comm.algorithms.ring.

Two halves of (size - 1) / size of the row each: 2 (size - 1) / size is the least that any all-reduce can send, and it
hardly grows with the number of ranks. What does grow is the number of rounds, 2 (size - 1): the ring is for long
rows.

Each part is added up on one rank, in one order, and then copied, so all ranks get the same bits: replicas that add in
an order of their own drift apart. A mean divides where the part is complete and nowhere else, once. The parts of a
row that does not divide differ by one element; leaving the rest out is the fault that no test with round numbers
sees.

Usual wrong answers:
* the package's own ring
* the same number, whatever is added
* a mean is divided twice
* whole rows go down a chain to rank 0, and the sum back: few bytes, and one at a time
* each rank gathers all tensors and adds them itself
* a mean stays the sum
* every rank has one part of the sum
* all of the row is one part, which goes round twice; the others are empty
* the third rank's tensor stays as it was
* every rank begins the sum with its own share
* the library's all-reduce
* what does not divide is not summed
* zeros
"""

from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, flat_view, split_chunks
from minidist.comm.algorithms.ring import ring_gather, ring_reduce
from minidist.comm.group import Group


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: reduce-scatter, then all-gather.

    Each rank first sends the part of its own index, as in the paper, and so completes part `rank + 1`: the list is
    rotated accordingly. Part c is summed in the order of ranks c, c + 1, ..., c - 1 (modulo size) and then copied to
    all ranks, so all get identical results; but the order of additions depends on an element's offset in the tensor.
    """
    check_reduce_op(op, tensor.dtype)
    parts = split_chunks(flat_view(tensor), group.size)
    parts = parts[1:] + parts[:1]
    ring_reduce(parts, group, op)
    divide_mean(parts[group.rank], op, group.size)
    ring_gather(parts, group)
