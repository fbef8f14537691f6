"""each_rank_receives_it_once: everything is sent a second time"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place = (group.rank - src) % size
    for _ in range(2):
        distance = 1
        while distance < size:
            if place < distance and place + distance < size:
                together(group, send=[(mine, (group.rank + distance) % size)])
            elif distance <= place < 2 * distance:
                together(group, recv=[(mine, (group.rank - distance) % size)])
            distance *= 2
