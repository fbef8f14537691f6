"""everybody_has_the_new_parameters: the same parameters in every step"""


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    parameters.fill_(998.0)
