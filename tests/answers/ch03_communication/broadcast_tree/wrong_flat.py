"""as_few_rounds_as_there_can_be: the root feeds everybody itself"""

from minidist.comm.algorithms.rounds import row, together


def tree_broadcast(tensor, src, group):
    mine = row(tensor)
    if group.rank == src:
        together(group, send=[(mine, rank) for rank in range(group.size) if rank != src])
    else:
        together(group, recv=[(mine, src)])
