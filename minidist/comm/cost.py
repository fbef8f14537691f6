"""The alpha-beta-gamma cost model: the modelled time of a collective.

A message of n bytes takes `alpha + n beta` seconds; the model ignores contention, and a rank sends one message and
receives one at a time. Reducing n bytes takes `n gamma`. The cost of an algorithm is that of its critical path: a
`Cost` counts its rounds, bytes sent and bytes reduced, and a `Link` converts these counts to seconds.

Thakur, Rabenseifner and Gropp 2005, sections 3 and 4 (the model, the algorithms); Rabenseifner 2004; Patarasuk and Yuan
2009 (all-reduce cannot send less than the ring); Chan et al. 2007 (lower bounds). Bus bandwidth: nccl-tests,
doc/PERFORMANCE.md.
"""

from dataclasses import dataclass

from minidist.comm.power_of_two import PowerOfTwoRanks
from minidist.comm.wire_bytes import IMPLEMENTED_ALGORITHMS


@dataclass(frozen=True)
class Link:
    """Parameters of the cost model.

    alpha_s: latency of an empty message in seconds. beta_s: seconds per byte sent. gamma_s: seconds per byte reduced.
    """

    alpha_s: float
    beta_s: float
    gamma_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Counts on the critical path: rounds, bytes sent in them, bytes reduced between them."""

    rounds: float
    sent: float
    reduced: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.rounds + other.rounds, self.sent + other.sent, self.reduced + other.reduced)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.rounds * times, self.sent * times, self.reduced * times)

    def seconds(self, link: Link) -> float:
        """Modelled time on `link`."""
        return self.rounds * link.alpha_s + self.sent * link.beta_s + self.reduced * link.gamma_s


ZERO_COST = Cost(0, 0)


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


def _halving_doubling_cost(name: str, algorithm: str, active: PowerOfTwoRanks, n: float) -> Cost:
    """Cost of recursive halving and doubling; folded ranks add a round before and a round after."""
    log, folds = tree_depth(active.count), active.num_folded > 0
    # Blocks of 1, 2, 4, ... active ranks are exchanged; the first active ranks represent the most ranks.
    blocks = sum(active.rank(1 << k) for k in range(log)) / active.size * n
    part, rest = n / active.size, (active.size - 1) / active.size * n
    match name, algorithm:
        case "all_gather", _:
            # The folded gets two messages: what is before its own part, and what is behind.
            return Cost(log, blocks) + Cost(3, part + rest) * folds
        case "reduce_scatter", _:
            return Cost(log, blocks, blocks) + Cost(2, n + part, n) * folds
        case "all_reduce", "doubling":
            return Cost(1, n, n) * log + Cost(2, 2 * n, n) * folds
    half = (active.count - 1) / active.count * n
    return Cost(2 * log, 2 * half, half) + Cost(2, 2 * n, n) * folds


def hierarchical_all_reduce_seconds(nodes: int, per_node: int, n: float, inside: Link, across: Link) -> float:
    """Return the seconds of a hierarchical all-reduce of n bytes, given the links inside a node and across nodes."""
    within = collective_cost("reduce_scatter", "ring", per_node, n) + collective_cost("all_gather", "ring", per_node, n)
    return within.seconds(inside) + collective_cost("all_reduce", "ring", nodes, n / per_node).seconds(across)


def cost_lower_bound(name: str, size: int, n: float) -> Cost:
    """Return the lower bound of each count, taken separately, over all algorithms for `name`. n: as `collective_cost`.

    Chan et al. 2007, lower bounds; Patarasuk and Yuan 2009, theorem 1, for the bytes of all_reduce.
    """
    if size == 1:
        return ZERO_COST
    part = (size - 1) / size * n
    sent, reduced = {
        "broadcast": (n, 0.0),
        "reduce": (n, part),
        "all_gather": (part, 0.0),
        "reduce_scatter": (part, part),
        "all_reduce": (2 * part, part),
        "all_to_all": (part, 0.0),
    }[name]
    return Cost(tree_depth(size), sent, reduced)


def tree_depth(size: int) -> int:
    """Rounds that a binomial tree over `size` ranks needs: ceil(log2(size))."""
    return (size - 1).bit_length()


def bus_bandwidth(name: str, size: int, n: float, seconds: float) -> float:
    """Return the bus bandwidth of nccl-tests in bytes per second: n / seconds times the operation's factor.

    With this factor an optimal algorithm shows the link's bandwidth, whatever the operation and the number of ranks.
    n: as in `collective_cost`.
    """
    part = (size - 1) / size
    factor = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": part,
        "all_to_all": part,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
    }[name]
    return factor * n / seconds


def fastest_algorithm(name: str, size: int, n: float, link: Link) -> str:
    """Return the algorithm with the lowest modelled time; of equals, the first in the table."""
    return min(
        IMPLEMENTED_ALGORITHMS[name], key=lambda algorithm: collective_cost(name, algorithm, size, n).seconds(link)
    )


def bandwidth_speedup(one: Cost, link: Link, faster: float = 10.0) -> float:
    """How many times faster an operation gets on a link that carries `faster` times the bytes, latency unchanged."""
    return one.seconds(link) / one.seconds(Link(link.alpha_s, link.beta_s / faster, link.gamma_s))
