"""everybody_has_the_new_parameters: always rank 0"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, 0, group, op)
    if group.rank == 0:
        update(parameters, gradient)
    flat_broadcast(parameters, 0, group)
