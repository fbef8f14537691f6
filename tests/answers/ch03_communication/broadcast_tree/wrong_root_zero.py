"""from_any_root: always from rank 0"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size, place = row(tensor), group.size, group.rank
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            together(group, send=[(mine, place + distance)])
        elif distance <= place < 2 * distance:
            together(group, recv=[(mine, place - distance)])
        distance *= 2
