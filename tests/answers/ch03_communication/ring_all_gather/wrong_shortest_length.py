"""parts_need_not_be_equal: takes every part for as long as the shortest"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    length = min(part.numel() for part in parts)
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size][:length], parts[(rank - 1 - step) % size][:length]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
