"""once_round_the_ring: the ring hands on a part, not the row"""

from minidist.comm.cost import NOTHING, Cost, _by_seats, depth
from minidist.comm.power_of_two import Seats
from minidist.comm.wire_bytes import OWN


def cost(name: str, algorithm: str, size: int, n: float) -> Cost:
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
            return Cost(size - 1, (size - 1) * n, (size - 1) * n)
        case "all_reduce", "naive":
            return add * (size - 1)
        case "all_reduce", "tree":
            return (add + pass_on) * log
        case "all_reduce", "ring":
            return Cost(2 * (size - 1), 2 * around, around)
    return _by_seats(name, algorithm, Seats(size), n)
