"""own_part_is_complete: the library's all-reduce"""

from minidist.comm import all_reduce


def travel_and_add(parts, group, op):
    all_reduce(parts[group.rank], group, op)
