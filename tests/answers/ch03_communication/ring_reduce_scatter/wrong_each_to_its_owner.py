"""only_to_the_neighbour: every part goes straight to the rank that completes it"""

import torch

from minidist.comm.algorithms.rounds import combine, together


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    for step in range(1, size):
        to, of = (rank + step) % size, (rank - step) % size
        arriving = torch.empty_like(parts[rank])
        together(group, send=[(parts[to], to)], recv=[(arriving, of)])
        combine(parts[rank], arriving, op)
