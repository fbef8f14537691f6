"""everybody_has_the_new_parameters: the package's own update"""

from minidist.comm import algorithms


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    algorithms.central_update(parameters, gradient, update, group, root, op)
