"""Predict the cost of a collective.

Write the missing lines of collective_cost; its docstring specifies the result.
You may call: Cost, tree_depth.
Check it with: python -m exercises check cost_formula

Stub 05e3ab24.
"""

from minidist.comm.power_of_two import PowerOfTwoRanks
from minidist.tools.network.algorithm_bytes import IMPLEMENTED_ALGORITHMS
from minidist.tools.network.cost import ZERO_COST, Cost, _halving_doubling_cost, tree_depth


def collective_cost(operation: str, algorithm: str, group_size: int, num_bytes: float) -> Cost:
    """Return the modelled cost of one collective over `group_size` ranks: rounds, bytes sent and bytes reduced.

    algorithm: one of `IMPLEMENTED_ALGORITHMS[operation]`. num_bytes: size of the tensor; for all_gather, reduce_scatter
    and all_to_all the size of the full tensor, whose shards count as equal. Raises ValueError if the operation has no
    such algorithm.
    """
    if algorithm not in IMPLEMENTED_ALGORITHMS.get(operation, ()):
        raise ValueError(f"no algorithm {algorithm!r} for {operation!r}: see minidist.tools.network.algorithm_bytes")
    if group_size == 1:
        return ZERO_COST
    # The full tensor in one round, without and with a reduction.
    pass_on, add = Cost(1, num_bytes), Cost(1, num_bytes, num_bytes)
    around, log = (group_size - 1) / group_size * num_bytes, tree_depth(group_size)
    match operation, algorithm:
        case "broadcast", "flat":
            return pass_on * (group_size - 1)  # one after the other through the root's link
        case "broadcast", "tree":
            raise NotImplementedError("a broadcast along a binomial tree")
        case "reduce", "flat":
            return add * (group_size - 1)
        case "reduce", "tree":
            return add * log
        case "parameter_server_step", _:
            return (add + pass_on) * (group_size - 1)
        case ("all_gather", "ring") | ("all_to_all", _):
            return Cost(group_size - 1, around)
        case "reduce_scatter", "ring":
            raise NotImplementedError("a ring reduce-scatter")
        case "all_reduce", "naive":
            return add * (group_size - 1)
        case "all_reduce", "tree":
            raise NotImplementedError("a tree all-reduce: reduce, then broadcast")
        case "all_reduce", "ring":
            raise NotImplementedError("a ring all-reduce")
    return _halving_doubling_cost(operation, algorithm, PowerOfTwoRanks(group_size), num_bytes)
