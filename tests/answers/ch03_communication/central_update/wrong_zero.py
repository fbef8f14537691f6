"""everybody_has_the_new_parameters: zeros on all ranks"""


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    parameters.zero_()
