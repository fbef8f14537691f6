"""What it costs before it is run.

Write the missing lines of cost; the docstring says what is asked.
You may call: Cost, depth.
Check it with: python -m exercises check cost_formula

Stub 6ed257c2.
"""

from minidist.comm.cost import NOTHING, Cost, _by_seats, depth
from minidist.comm.power_of_two import Seats
from minidist.comm.wire_bytes import OWN


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
            raise NotImplementedError("a reduce-scatter round the ring")
        case "all_reduce", "naive":
            return add * (size - 1)
        case "all_reduce", "tree":
            raise NotImplementedError("an all-reduce up a tree and down again")
        case "all_reduce", "ring":
            raise NotImplementedError("an all-reduce round the ring")
    return _by_seats(name, algorithm, Seats(size), n)
