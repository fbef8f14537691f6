"""A binomial tree in both directions, on a copy of the gradient."""

from minidist.comm.algorithms.root import tree_broadcast, tree_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    total = gradient.clone()
    tree_reduce(total, root, group, op)
    if group.rank == root:
        update(parameters, total)
    tree_broadcast(parameters, root, group)
