"""own_part_is_complete: completes the part after its own"""

from minidist.comm.algorithms.rounds import combine, together


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    scratch = parts[0].new_empty(max(part.numel() for part in parts))
    for step in range(size - 1):
        leaving, staying = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        arriving = scratch[: staying.numel()]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        combine(staying, arriving, op)
