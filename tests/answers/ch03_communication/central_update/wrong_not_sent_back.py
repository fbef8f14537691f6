"""everybody_has_the_new_parameters: only the root has the new parameters"""

from minidist.comm.algorithms.root import flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
