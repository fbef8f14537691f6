"""everybody_has_the_sum: zeros"""


def all_reduce(tensor, group, op="sum"):
    tensor.zero_()
