"""everybody_has_the_sum: the package's own ring"""

from minidist.comm.algorithms import ring


def all_reduce(tensor, group, op="sum"):
    ring.all_reduce(tensor, group, op)
