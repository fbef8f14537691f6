"""powers_of_two: zeros"""


def doubling_all_reduce(tensor, group, op="sum"):
    tensor.zero_()
