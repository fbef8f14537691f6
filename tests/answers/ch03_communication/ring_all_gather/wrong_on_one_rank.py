"""everybody_has_every_part: the fourth rank puts the first part in the place of the second"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
    if rank == 3:
        parts[1].copy_(parts[0])
