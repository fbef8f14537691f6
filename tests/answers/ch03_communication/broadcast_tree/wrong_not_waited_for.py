"""everybody_has_it: feeds before it has got the tensor itself"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    before = mine.clone()
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            together(group, send=[(before, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            together(group, recv=[(mine, (group.rank - distance) % size)])
        distance *= 2
