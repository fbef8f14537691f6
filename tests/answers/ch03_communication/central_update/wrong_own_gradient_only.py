"""everybody_has_the_new_parameters: the root updates before it has collected"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    if group.rank == root:
        update(parameters, gradient)
    flat_reduce(gradient, root, group, op)
    flat_broadcast(parameters, root, group)
