"""everybody_has_every_part: what arrives is put into the list, and not into the row that its views were of"""

from minidist.comm.algorithms.rounds import together


def travel(parts, group):
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, place = parts[(rank - step) % size], (rank - 1 - step) % size
        arriving = parts[place].new_empty(parts[place].numel())
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        parts[place] = arriving
