"""The last part takes what is left over, and a mean divides the whole row at the end."""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, finish, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    elements, size = row(tensor), group.size
    length = elements.numel() // size
    parts = list(elements.split([length] * (size - 1) + [elements.numel() - length * (size - 1)]))
    travel_and_add(parts, group, op)
    travel(parts, group)
    finish(elements, op, size)
