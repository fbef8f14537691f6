"""everybody_has_it: on 3 ranks the last one gets nothing"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    distance = 1
    while 2 * distance <= size:
        if place < distance:
            together(group, send=[(mine, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            together(group, recv=[(mine, (group.rank - distance) % size)])
        distance *= 2
