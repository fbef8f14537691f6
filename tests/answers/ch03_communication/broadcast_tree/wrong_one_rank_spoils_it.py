"""everybody_has_it: wrong on the last of four ranks only"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            together(group, send=[(mine, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            together(group, recv=[(mine, (group.rank - distance) % size)])
        distance *= 2
    if group.rank == 3:
        tensor.mul_(2)
