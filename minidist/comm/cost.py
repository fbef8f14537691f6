"""What a collective costs before it is run: the alpha-beta-gamma model.

A message of n bytes takes `alpha + n beta` seconds, whatever else is on its way, and a rank sends one and receives one
at a time; reducing n bytes takes `n gamma`. An algorithm then costs what its slowest chain of rounds does, which is
three counts: rounds, bytes sent, bytes reduced. They are the `Cost` of this module; a `Link` makes seconds of them.

Thakur, Rabenseifner and Gropp 2005, sections 3 and 4 (the model, the algorithms); Rabenseifner 2004; Patarasuk and Yuan
2009 (all-reduce cannot send less than the ring); Chan et al. 2007 (lower bounds). Bus bandwidth: nccl-tests,
doc/PERFORMANCE.md.
"""

from dataclasses import dataclass

from minidist.comm.power_of_two import Seats
from minidist.comm.wire_bytes import OWN


@dataclass(frozen=True)
class Link:
    """What the network and the processor can do. alpha_s: seconds a message takes that carries nothing.

    beta_s: seconds per byte sent; gamma_s: seconds per byte reduced.
    """

    alpha_s: float
    beta_s: float
    gamma_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The counts of the slowest chain: rounds, bytes sent in them, bytes reduced between them."""

    rounds: float
    sent: float
    reduced: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.rounds + other.rounds, self.sent + other.sent, self.reduced + other.reduced)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.rounds * times, self.sent * times, self.reduced * times)

    def seconds(self, link: Link) -> float:
        return self.rounds * link.alpha_s + self.sent * link.beta_s + self.reduced * link.gamma_s


NOTHING = Cost(0, 0)


def cost(name: str, algorithm: str, size: int, n: float) -> Cost:
    """The cost of one operation of `size` ranks by an algorithm of `convention.OWN`.

    n: bytes of the tensor the operation is about, as in the convention table: the whole of all_gather, reduce_scatter
    and all_to_all. Parts are taken as equal. Raises ValueError for an unknown algorithm.
    """
    if algorithm not in OWN.get(name, ()):
        raise ValueError(f"no algorithm {algorithm!r} for {name!r}: see minidist.comm.wire_bytes.OWN")
    if size == 1:
        return NOTHING
    pass_on, add = Cost(1, n), Cost(1, n, n)  # a whole row in one round, without and with adding it up
    around, log = (size - 1) / size * n, depth(size)
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
    return _by_seats(name, algorithm, Seats(size), n)


def _by_seats(name: str, algorithm: str, seats: Seats, n: float) -> Cost:
    """Halving and doubling; ranks without a seat add a round before and a round after."""
    log, folds = depth(seats.core), seats.extra > 0
    # The blocks of 1, 2, 4, ... seats that are swapped; the first seats stand for most ranks.
    blocks = sum(seats.first(1 << k) for k in range(log)) / seats.size * n
    part, rest = n / seats.size, (seats.size - 1) / seats.size * n
    match name, algorithm:
        case "all_gather", _:
            # The guest gets two messages: what is before its own part, and what is behind.
            return Cost(log, blocks) + Cost(3, part + rest) * folds
        case "reduce_scatter", _:
            return Cost(log, blocks, blocks) + Cost(2, n + part, n) * folds
        case "all_reduce", "doubling":
            return Cost(1, n, n) * log + Cost(2, 2 * n, n) * folds
    half = (seats.core - 1) / seats.core * n
    return Cost(2 * log, 2 * half, half) + Cost(2, 2 * n, n) * folds


def hierarchical_seconds(nodes: int, per_node: int, n: float, inside: Link, across: Link) -> float:
    """Seconds of a hierarchical all-reduce of n bytes: two links, as messages inside a node cost less than across."""
    within = cost("reduce_scatter", "ring", per_node, n) + cost("all_gather", "ring", per_node, n)
    return within.seconds(inside) + cost("all_reduce", "ring", nodes, n / per_node).seconds(across)


def lower_bound(name: str, size: int, n: float) -> Cost:
    """What no algorithm can go below, in each of the three counts by itself. Chan et al. 2007, lower bounds.

    Patarasuk and Yuan 2009, theorem 1, for what all_reduce sends.
    """
    if size == 1:
        return NOTHING
    part = (size - 1) / size * n
    sent, reduced = {
        "broadcast": (n, 0.0),
        "reduce": (n, part),
        "all_gather": (part, 0.0),
        "reduce_scatter": (part, part),
        "all_reduce": (2 * part, part),
        "all_to_all": (part, 0.0),
    }[name]
    return Cost(depth(size), sent, reduced)


def depth(size: int) -> int:
    """Rounds after which something known to one of `size` ranks can be known to all: ceil(log2(size))."""
    return (size - 1).bit_length()


def bus_bandwidth(name: str, size: int, n: float, seconds: float) -> float:
    """Bytes per second that the slowest link must have carried: n / seconds times the operation's own factor.

    So scaled, a perfect algorithm shows the link's speed, whatever the operation and the number of ranks. n: as in
    `cost`.
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


def fastest(name: str, size: int, n: float, link: Link) -> str:
    """The algorithm of least cost; of equals the one named first in the table."""
    return min(OWN[name], key=lambda algorithm: cost(name, algorithm, size, n).seconds(link))


def gain(one: Cost, link: Link, faster: float = 10.0) -> float:
    """How many times faster an operation gets on a link that carries `faster` times the bytes, latency unchanged."""
    return one.seconds(link) / one.seconds(Link(link.alpha_s, link.beta_s / faster, link.gamma_s))
