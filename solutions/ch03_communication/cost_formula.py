"""Predict the cost of a collective: the solution, as it stands in minidist.comm.cost.

A message costs alpha plus beta per byte; an addition costs gamma per byte. So three counts describe an algorithm, and
the size of the tensor decides which algorithm is best: small tensors need few rounds (a tree, recursive doubling),
large ones few bytes (the ring). On a link with ten times the bandwidth the bytes get cheaper and the rounds do not,
so the boundary between the two moves.

The critical path counts, not the total: in one round of the tree many messages are in flight at once, and together
they take the time of one.

Usual wrong answers:
* the gathering half adds nothing up
* the package's own formula
* the same for everything
* right for powers of two only
* nobody learns the sum but the root
* n instead of (size - 1) / size of it
* an empty row is taken to cost no rounds
* half of the rounds
* counts every message, not the chain of rounds
* the ring hands on a part, not the row
* everything is free
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
            return pass_on * log
        case "reduce", "flat":
            return add * (size - 1)
        case "reduce", "tree":
            return add * log
        case "central_update", _:
            return (add + pass_on) * (size - 1)
        case ("all_gather", "ring") | ("all_to_all", _):
            return Cost(size - 1, around)
        case "reduce_scatter", "ring":
            return Cost(size - 1, around, around)
        case "all_reduce", "naive":
            return add * (size - 1)
        case "all_reduce", "tree":
            return (add + pass_on) * log
        case "all_reduce", "ring":
            return Cost(2 * (size - 1), 2 * around, around)
    return _halving_doubling_cost(name, algorithm, PowerOfTwoRanks(size), n)
