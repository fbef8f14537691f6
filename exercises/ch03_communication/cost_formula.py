"""Predict the cost of a collective.

Write the missing lines of collective_cost; its docstring specifies the result.
You may call: Cost, tree_depth.
Check it with: python -m exercises check cost_formula

Stub 771045e9.
"""

from minidist.comm.cost import ZERO_COST, Cost, _halving_doubling_cost, tree_depth
from minidist.comm.power_of_two import PowerOfTwoRanks
from minidist.comm.wire_bytes import IMPLEMENTED_ALGORITHMS


def collective_cost(name: str, algorithm: str, size: int, n: float) -> Cost:
    """Return the cost of operation `name` over `size` ranks by an algorithm of `wire_bytes.IMPLEMENTED_ALGORITHMS`.

    n: bytes of the tensor, as in `wire_bytes`: the full tensor for all_gather, reduce_scatter and all_to_all, with
    shards taken as equal. Raises ValueError for an unknown algorithm.
    """
    if algorithm not in IMPLEMENTED_ALGORITHMS.get(name, ()):
        raise ValueError(
            f"no algorithm {algorithm!r} for {name!r}: see minidist.comm.wire_bytes.IMPLEMENTED_ALGORITHMS"
        )
    if size == 1:
        return ZERO_COST
    pass_on, add = Cost(1, n), Cost(1, n, n)  # the full tensor in one round, without and with a reduction
    around, log = (size - 1) / size * n, tree_depth(size)
    match name, algorithm:
        case "broadcast", "flat":
            return pass_on * (size - 1)  # one after the other through the root's link
        case "broadcast", "tree":
            raise NotImplementedError("a broadcast along a binomial tree")
        case "reduce", "flat":
            return add * (size - 1)
        case "reduce", "tree":
            return add * log
        case "central_update", _:
            return (add + pass_on) * (size - 1)
        case ("all_gather", "ring") | ("all_to_all", _):
            return Cost(size - 1, around)
        case "reduce_scatter", "ring":
            raise NotImplementedError("a ring reduce-scatter")
        case "all_reduce", "naive":
            return add * (size - 1)
        case "all_reduce", "tree":
            raise NotImplementedError("a tree all-reduce: reduce, then broadcast")
        case "all_reduce", "ring":
            raise NotImplementedError("a ring all-reduce")
    return _halving_doubling_cost(name, algorithm, PowerOfTwoRanks(size), n)
