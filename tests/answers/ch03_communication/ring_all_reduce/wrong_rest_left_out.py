"""sizes_need_not_divide: what does not divide is not summed"""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, cut, finish, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    elements, size = row(tensor), group.size
    parts = cut(elements[: elements.numel() // size * size], size)
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, size)
    travel(parts, group)
