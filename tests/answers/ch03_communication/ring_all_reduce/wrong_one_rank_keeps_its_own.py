"""everybody_has_the_sum: the third rank's tensor stays as it was"""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, cut, finish, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    before = tensor.clone()
    parts = cut(row(tensor), group.size)
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, group.size)
    travel(parts, group)
    if group.rank == 2:
        tensor.copy_(before)
