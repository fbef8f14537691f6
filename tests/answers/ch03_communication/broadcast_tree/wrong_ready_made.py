"""everybody_has_it: the library's broadcast"""

from minidist.comm import broadcast


def tree_broadcast(tensor, src, group):
    broadcast(tensor, src, group)
