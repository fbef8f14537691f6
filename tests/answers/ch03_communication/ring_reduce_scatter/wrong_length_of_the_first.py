"""parts_need_not_be_equal: takes every part for as long as the first"""

from minidist.comm.algorithms.rounds import combine, together


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    length = min(part.numel() for part in parts)
    for step in range(size - 1):
        leaving, staying = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        arriving = staying[:length].clone()
        together(group, send=[(leaving[:length], (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        combine(staying[:length], arriving, op)
