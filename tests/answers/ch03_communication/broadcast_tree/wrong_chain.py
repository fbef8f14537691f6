"""as_few_rounds_as_there_can_be: handed on from each rank to the next"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    if place:
        together(group, recv=[(mine, (group.rank - 1) % size)])
    if place + 1 < size:
        together(group, send=[(mine, (group.rank + 1) % size)])
