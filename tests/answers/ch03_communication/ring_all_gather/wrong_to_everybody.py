"""only_to_the_neighbour: each part goes straight to everybody"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(1, size):
        to, of = (rank + step) % size, (rank - step) % size
        together(group, send=[(parts[rank], to)], recv=[(parts[of], of)])
