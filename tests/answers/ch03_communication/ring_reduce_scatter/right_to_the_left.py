"""Round the ring the other way."""

import torch

from minidist.comm.algorithms.rounds import combine, together


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    for step in range(1, size):
        leaving, staying = parts[(rank + step) % size], parts[(rank + step + 1) % size]
        arriving = torch.empty_like(staying)
        together(group, send=[(leaving, (rank - 1) % size)], recv=[(arriving, (rank + 1) % size)])
        combine(staying, arriving, op)
