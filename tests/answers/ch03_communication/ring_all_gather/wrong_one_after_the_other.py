"""only_to_the_neighbour: rank 0 begins a round, and every other rank sends when it has received"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        if rank == 0:
            together(group, send=[(leaving, 1)])
        together(group, recv=[(arriving, (rank - 1) % size)])
        if rank > 0:
            together(group, send=[(leaving, (rank + 1) % size)])
