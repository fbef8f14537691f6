"""everybody_has_every_part: sends its own part in every round"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[rank], parts[(rank - 1 - step) % size]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
