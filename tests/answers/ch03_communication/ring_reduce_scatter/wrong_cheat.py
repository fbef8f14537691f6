"""own_part_is_complete: the package's own ring"""

from minidist.comm.algorithms import ring


def travel_and_add(parts, group, op):
    ring.travel_and_add(parts, group, op)
