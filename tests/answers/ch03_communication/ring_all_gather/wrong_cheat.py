"""everybody_has_every_part: the package's own ring"""

from minidist.comm.algorithms import ring


def travel(parts, group):
    ring.travel(parts, group)
