"""Round the ring the other way."""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[(rank + step) % size], parts[(rank + step + 1) % size]
        together(group, send=[(leaving, (rank - 1) % size)], recv=[(arriving, (rank + 1) % size)])
