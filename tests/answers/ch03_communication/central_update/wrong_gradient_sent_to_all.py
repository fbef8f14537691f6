"""gradients_in_parameters_out: the sum travels too, and replaces each rank's gradient"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, root, group, op)
    flat_broadcast(gradient, root, group)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
