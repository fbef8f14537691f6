"""everybody_has_every_part: the last round is missing"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 2):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
