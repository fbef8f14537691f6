"""own_part_is_complete: sums are put into the list, and the row that its views were of keeps what it had"""

from minidist.comm.algorithms.rounds import combine, together


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, place = parts[(rank - 1 - step) % size], (rank - 2 - step) % size
        arriving = parts[place].new_empty(parts[place].numel())
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        parts[place] = parts[place].clone()
        combine(parts[place], arriving, op)
