"""everybody_has_the_new_parameters: the third rank keeps its own parameters"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
    before = parameters.clone()
    flat_broadcast(parameters, root, group)
    if group.rank == 2 != root:
        parameters.copy_(before)
