"""reduced_as_asked: a mean stays the sum"""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, cut, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    parts = cut(row(tensor), group.size)
    travel_and_add(parts, group, op)
    travel(parts, group)
