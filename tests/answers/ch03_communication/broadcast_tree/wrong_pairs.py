"""as_few_rounds_as_there_can_be: the root feeds every second place, and each of these its neighbour"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine, size = row(tensor), group.size
    place, ranks = (group.rank - src) % size, [(src + place) % size for place in range(size)]
    if place == 0:
        for fed in (*range(2, size, 2), *range(1, min(2, size))):
            together(group, send=[(mine, ranks[fed])])
    elif place % 2 == 0:
        together(group, recv=[(mine, src)])
        if place + 1 < size:
            together(group, send=[(mine, ranks[place + 1])])
    else:
        together(group, recv=[(mine, ranks[place - 1])])
