"""as_few_bytes_as_there_can_be: all of the row is one part, which goes round twice; the others are empty"""

from minidist.comm.algorithms.ring import travel, travel_and_add
from minidist.comm.algorithms.rounds import check, finish, row


def all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    mine = row(tensor)
    parts = [mine] + [mine[:0]] * (group.size - 1)
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, group.size)
    travel(parts, group)
