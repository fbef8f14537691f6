"""The root feeds the farthest first: distances from the largest down."""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    distance = 1 << (size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < size:
            together(group, send=[(mine, (group.rank + distance) % size)])
        elif place % (2 * distance) == distance:
            together(group, recv=[(mine, (group.rank - distance) % size)])
