"""All-reduce for machines whose ranks are near each other inside a node and far from those of other nodes.

Inside the node the row is reduced and scattered, so each rank has one part of it; that part alone crosses the slow
network; inside the node the parts are gathered again. Between nodes a rank sends 2 (nodes - 1) / nodes of its part:
with m ranks in a node an m-th of what a ring over all ranks would. Mikami et al. 2018 (2D-torus all-reduce).
"""

from torch import Tensor

from minidist.comm.algorithms.ring import all_reduce, travel, travel_and_add
from minidist.comm.algorithms.rounds import check, cut, finish, row
from minidist.comm.group import Group


def hierarchical_all_reduce(tensor: Tensor, inside: Group, across: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction over all nodes.

    inside: the ranks of this node; across: the ranks with this one's place in every node. All nodes have as many ranks.
    """
    check(op, tensor.dtype)
    parts = cut(row(tensor), inside.size)
    mine = parts[inside.rank]
    adding = "sum" if op == "mean" else op
    travel_and_add(parts, inside, adding)
    all_reduce(mine, across, adding)
    finish(mine, op, inside.size * across.size)
    travel(parts, inside)
