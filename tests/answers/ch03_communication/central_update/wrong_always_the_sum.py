"""reduced_as_asked: a mean is not divided"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, root, group)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
