"""Predict the cost of a collective.

Write the cost model: for each collective and algorithm of this chapter the rounds, the bytes sent and the bytes
reduced on the critical path, the slowest chain of rounds. A Link turns these counts into seconds.

operation, algorithm: one of `IMPLEMENTED_ALGORITHMS`; ValueError otherwise. num_bytes: of the full tensor. Returns a
Cost. Flat and naive algorithms count one round per message through the busiest link, a ring one chunk of num_bytes /
group_size per round. One rank costs nothing. Only the root of a flat reduce adds, and the naive all-reduce adds on
every rank.
Example: 4 ranks, 1000 bytes; broadcast by a tree has the Cost (2 rounds, 2000 bytes sent, 0 reduced),
    reduce flat (3, 3000, 3000), reduce_scatter by a ring (3, 750, 750), all_reduce by a ring (6, 1500, 750)

Checked: every algorithm on 1 to 9 ranks, against rounds simulated one by one; unknown names; an empty tensor.

You may call:
    Cost(num_rounds, sent_bytes, reduced_bytes=0.0)   can be added to a Cost and multiplied by a number
    ZERO_COST   Cost(0, 0)
    tree_depth(group_size)   the number of rounds of a tree, ceil(log2(group_size))
    _halving_doubling_cost(operation, algorithm, PowerOfTwoRanks(group_size), num_bytes)   the Cost of the others
    IMPLEMENTED_ALGORITHMS   {operation: (algorithm, ...)}

Check it with: python -m exercises check cost_formula

Stub 52d804bd.
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
    raise NotImplementedError("return the cost of every algorithm")
