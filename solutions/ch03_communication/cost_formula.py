"""Predict the cost of a collective: the solution, as it stands in minidist.tools.network.cost.

A message costs alpha plus beta per byte; an addition costs gamma per byte. So three counts describe an algorithm, and
the size of the tensor decides which algorithm is best: small tensors need few rounds (a tree, recursive doubling),
large ones few bytes (the ring). On a link with ten times the bandwidth the bytes get cheaper and the rounds do not,
so the boundary between the two moves.

The critical path counts, not the total: in one round of the tree many messages are in flight at once, and together
they take the time of one.

Usual wrong answers:
* counts additions in the all-gather half, which has none
* takes an unknown algorithm for one of those that are left
* the package's own formula
* the same cost for everything
* right for powers of two only
* counts one round for the naive all-reduce, whose messages share each rank's link
* a tensor travels even if there is one rank only
* only the reduce: no rank but the root has the sum
* n instead of (size - 1) / size * n
* counts no additions in the flat reduce
* forgets the way back of the parameter-server step
* no rounds for an empty tensor
* half of the rounds
* counts all messages instead of the critical path
* accepts unknown names on one rank
* the full tensor in each round of the ring, which sends only a chunk
* everything is free
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
            return pass_on * log
        case "reduce", "flat":
            return add * (group_size - 1)
        case "reduce", "tree":
            return add * log
        case "parameter_server_step", _:
            return (add + pass_on) * (group_size - 1)
        case ("all_gather", "ring") | ("all_to_all", _):
            return Cost(group_size - 1, around)
        case "reduce_scatter", "ring":
            return Cost(group_size - 1, around, around)
        case "all_reduce", "naive":
            return add * (group_size - 1)
        case "all_reduce", "tree":
            return (add + pass_on) * log
        case "all_reduce", "ring":
            return Cost(2 * (group_size - 1), 2 * around, around)
    return _halving_doubling_cost(operation, algorithm, PowerOfTwoRanks(group_size), num_bytes)
