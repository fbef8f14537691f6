"""The alpha-beta-gamma cost model: the modelled time of a collective.

A message of n bytes takes `alpha + n beta` seconds; the model ignores contention, and a rank sends one message and
receives one at a time. Reducing n bytes takes `n gamma`. The cost of an algorithm is that of its critical path: a
`Cost` counts its rounds, bytes sent and bytes reduced, and a `Link` converts these counts to seconds.

Thakur, Rabenseifner and Gropp 2005, sections 3 and 4 (the model, the algorithms); Rabenseifner 2004; Patarasuk and Yuan
2009 (all-reduce cannot send less than the ring); Chan et al. 2007 (lower bounds). Bus bandwidth: nccl-tests,
doc/PERFORMANCE.md.
"""

from dataclasses import dataclass

# By operation, the algorithms of this model: those of `simple.collectives`, and the pairwise all-to-all of backends.
MODELLED_ALGORITHMS = {
    "broadcast": ("tree",),
    "reduce": ("tree",),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "all_reduce": ("tree", "ring", "doubling"),
    "all_to_all": ("pairwise",),
}


@dataclass(frozen=True)
class Link:
    """The speed of a network link, as parameters of the cost model.

    alpha_s: latency of a message, in seconds. beta_s: seconds per byte sent. gamma_s: seconds per byte reduced.
    """

    alpha_s: float
    beta_s: float
    gamma_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The cost of a collective, as counts on its critical path: rounds of messages, bytes sent, and bytes reduced."""

    num_rounds: float
    sent_bytes: float
    reduced_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.num_rounds + other.num_rounds,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.num_rounds * times, self.sent_bytes * times, self.reduced_bytes * times)

    def seconds(self, link: Link) -> float:
        """Return the modelled time of this cost on `link`, in seconds."""
        return self.num_rounds * link.alpha_s + self.sent_bytes * link.beta_s + self.reduced_bytes * link.gamma_s


ZERO_COST = Cost(0, 0)


def collective_cost(operation: str, algorithm: str, group_size: int, num_bytes: float) -> Cost:
    """Return the modelled cost of one collective over `group_size` ranks: rounds, bytes sent and bytes reduced.

    algorithm: one of `MODELLED_ALGORITHMS[operation]`. num_bytes: size of the tensor; for all_gather, reduce_scatter
    and all_to_all the size of the full tensor, whose shards count as equal. Raises ValueError if the operation has no
    such algorithm.
    """
    if algorithm not in MODELLED_ALGORITHMS.get(operation, ()):
        raise ValueError(f"no algorithm {algorithm!r} for {operation!r}: possible are {MODELLED_ALGORITHMS}")
    if group_size == 1:
        return ZERO_COST
    # The full tensor in one round, without and with a reduction.
    pass_on, add = Cost(1, num_bytes), Cost(1, num_bytes, num_bytes)
    around, log = (group_size - 1) / group_size * num_bytes, tree_depth(group_size)
    match operation, algorithm:
        case "broadcast", "tree":
            return pass_on * log
        case "reduce", "tree":
            return add * log
        case ("all_gather", "ring") | ("all_to_all", _):
            return Cost(group_size - 1, around)
        case "reduce_scatter", "ring":
            return Cost(group_size - 1, around, around)
        case "all_reduce", "tree":
            return (add + pass_on) * log
        case "all_reduce", "ring":
            return Cost(2 * (group_size - 1), 2 * around, around)
    # Recursive halving and doubling over a power of two of ranks; the others are folded, in one round before and after.
    rounds = group_size.bit_length() - 1
    part = (1 - 1 / 2**rounds) * num_bytes
    return Cost(2 * rounds, 2 * part, part) + (add + pass_on) * (group_size > 2**rounds)


def hierarchical_all_reduce_seconds(
    num_nodes: int, ranks_per_node: int, num_bytes: float, intra_node: Link, inter_node: Link
) -> float:
    """Return the modelled time, in seconds, of a hierarchical all-reduce of a tensor of `num_bytes` bytes.

    Reduce-scatter and all-gather run within each node over `intra_node`, all-reduces of the shards between the nodes
    over `inter_node`; all by the ring algorithm.
    """
    scatter = collective_cost("reduce_scatter", "ring", ranks_per_node, num_bytes)
    gather = collective_cost("all_gather", "ring", ranks_per_node, num_bytes)
    across = collective_cost("all_reduce", "ring", num_nodes, num_bytes / ranks_per_node)
    return (scatter + gather).seconds(intra_node) + across.seconds(inter_node)


def cost_lower_bound(operation: str, group_size: int, num_bytes: float) -> Cost:
    """Return the least rounds, bytes sent and bytes reduced that any algorithm for the operation needs.

    Each of the three bounds holds separately: one algorithm need not reach all of them. Arguments as in
    `collective_cost`.
    Chan et al. 2007, lower bounds; Patarasuk and Yuan 2009, theorem 1, for the bytes of all_reduce.
    """
    if group_size == 1:
        return ZERO_COST
    part = (group_size - 1) / group_size * num_bytes
    sent, reduced = {
        "broadcast": (num_bytes, 0.0),
        "reduce": (num_bytes, part),
        "all_gather": (part, 0.0),
        "reduce_scatter": (part, part),
        "all_reduce": (2 * part, part),
        "all_to_all": (part, 0.0),
    }[operation]
    return Cost(tree_depth(group_size), sent, reduced)


def tree_depth(group_size: int) -> int:
    """Return the number of rounds that a binomial tree over `group_size` ranks needs: ceil(log2(group_size))."""
    return (group_size - 1).bit_length()


def bus_bandwidth(operation: str, group_size: int, num_bytes: float, seconds: float) -> float:
    """Return the bus bandwidth of nccl-tests in bytes per second: num_bytes / seconds times a factor of the operation.

    The factor makes the result of an optimal algorithm equal to the link's bandwidth, whatever the operation and the
    number of ranks. num_bytes: size of the tensor, as in `collective_cost`. seconds: the measured time.
    """
    part = (group_size - 1) / group_size
    factor = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": part,
        "all_to_all": part,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
    }[operation]
    return factor * num_bytes / seconds


def fastest_algorithm(operation: str, group_size: int, num_bytes: float, link: Link) -> str:
    """Return the name of the collective's algorithm with the lowest modelled time on `link`.

    Of equally fast algorithms, the first in `MODELLED_ALGORITHMS[operation]`. num_bytes: as in `collective_cost`.
    """
    return min(
        MODELLED_ALGORITHMS[operation],
        key=lambda algorithm: collective_cost(operation, algorithm, group_size, num_bytes).seconds(link),
    )


def bandwidth_speedup(cost: Cost, link: Link, bandwidth_factor: float = 10.0) -> float:
    """Return how many times faster the operation is, by the model, with `bandwidth_factor` times the bandwidth.

    cost: of the operation. link: the present link. The latency and the speed of reducing stay the same.
    """
    return cost.seconds(link) / cost.seconds(Link(link.alpha_s, link.beta_s / bandwidth_factor, link.gamma_s))
