"""reduced_as_asked: a mean is divided twice"""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, cut, finish, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    elements = row(tensor)
    parts = cut(elements, group.size)
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, group.size)
    travel(parts, group)
    finish(elements, op, group.size)
