"""How many bytes one rank puts on the wire: the one table that meter, estimate and grader share.

`n` counts elements, `size` the ranks of the group and `rank` the place of this one. The figures are exact for the
named algorithm, with the chunk sizes that an uneven cut really has; they are not averages. A library may use another
algorithm than the one named here, so a figure for its collective is *modelled*; for a transfer it is what was sent.

Algorithms: ring, Patarasuk and Yuan 2009, section 3; the others, Thakur et al. 2005, section 4. `OWN` lists those of
`comm/algorithms`, which send and receive for themselves: `sent_by` predicts them, and the meter counts what they send.
"""

from collections.abc import Sequence

from minidist.comm.power_of_two import Seats

# What a library's collective is taken to be.
ALGORITHM = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "binomial tree",
    "reduce": "binomial tree",
    "all_to_all": "pairwise",
    "gather": "flat",
    "scatter": "flat",
    "send": "direct",
    "recv": "direct",
    "barrier": "none",
}

EXACT = frozenset({"send", "recv"})

OWN = {
    "broadcast": ("flat", "tree"),
    "reduce": ("flat", "tree"),
    "central_update": ("flat",),
    "all_gather": ("ring", "doubling"),
    "reduce_scatter": ("ring", "halving"),
    "all_reduce": ("naive", "tree", "ring", "doubling", "rabenseifner"),
    "all_to_all": ("pairwise",),
}


def chunks(n: int, size: int) -> list[int]:
    """`n` elements cut into `size` consecutive parts, the first `n % size` of them one element longer."""
    part, rest = divmod(n, size)
    return [part + (i < rest) for i in range(size)]


def sent_elements(
    name: str, n: int, size: int, rank: int, *, root: int = 0, splits: Sequence[int] | None = None
) -> int:
    """Elements that `rank` sends in one operation of the group.

    n: elements of the tensor the operation is about: the reduced one of all_reduce and reduce, the whole input of
        reduce_scatter, the whole output of all_gather, the tensor of broadcast, send and recv, this rank's whole input
        of all_to_all, one rank's part in gather and scatter.
    root: the group rank that broadcasts, or that reduce, gather and scatter are about.
    splits: elements this rank has for every other rank, for all_to_all; equal parts when None.
    """
    if size == 1:
        return 0
    relative = (rank - root) % size
    match name:
        case "all_reduce":
            # The ring's first half sends every chunk but the one this rank ends up owning, its second half every
            # chunk but the one its neighbour already owns.
            parts = chunks(n, size)
            return 2 * n - parts[(rank + 1) % size] - parts[(rank + 2) % size]
        case "reduce_scatter":
            return n - chunks(n, size)[rank]
        case "all_gather":
            return n - chunks(n, size)[(rank + 1) % size]
        case "broadcast":
            # In the binomial tree the rank at distance v from the root feeds v + 2^k for every 2^k above v.
            return n * sum(1 for k in range(size.bit_length()) if (1 << k) > relative and relative + (1 << k) < size)
        case "reduce" | "gather":
            return n if relative else 0
        case "scatter":
            return 0 if relative else n * (size - 1)
        case "all_to_all":
            parts = chunks(n, size) if splits is None else splits
            return sum(parts) - parts[rank]
        case "send":
            return n
        case "recv" | "barrier":
            return 0
    raise ValueError(f"no operation {name!r}: the table knows {', '.join(ALGORITHM)}")


def sent_by(
    name: str, algorithm: str, n: int, size: int, rank: int, *, root: int = 0, splits: Sequence[int] | None = None
) -> int:
    """Elements that `rank` sends in one operation carried out by an algorithm of `OWN`; arguments as above.

    n of a central update: elements of the parameters, of which there are as many gradients.
    """
    if algorithm not in OWN.get(name, ()):
        known = "; ".join(f"{operation}: {', '.join(names)}" for operation, names in OWN.items())
        raise ValueError(f"no algorithm {algorithm!r} for {name!r}: there are {known}")
    if size == 1:
        return 0
    match name, algorithm:
        case ("broadcast", "flat") | ("central_update", _):
            # The root sends to all; in a central update the others have sent it their gradients before.
            return n * (size - 1) if rank == root else n * (name == "central_update")
        case "all_reduce", "naive":
            return n * (size - 1)
        case "all_reduce", "tree":
            return sent_elements("reduce", n, size, rank) + sent_elements("broadcast", n, size, rank)
        case (_, "doubling") | (_, "halving") | (_, "rabenseifner"):
            return _sent_by_seats(name, algorithm, n, size, rank)
    return sent_elements(name, n, size, rank, root=root, splits=splits)


def _sent_by_seats(name: str, algorithm: str, n: int, size: int, rank: int) -> int:
    """Halving and doubling: a rank without a seat sends what it has, one with a guest also what the guest gets back."""
    seats, parts = Seats(size), chunks(n, size)
    if seats.stands(rank):
        return parts[rank] if name == "all_gather" else n
    guest, seat = seats.guest(rank), seats.of(rank)
    if name == "all_reduce":
        parts, back = chunks(n, seats.core), n
    else:
        back = 0 if guest is None else parts[guest] if name == "reduce_scatter" else n - parts[guest]
        parts = [sum(parts[seats.first(s) : seats.first(s + 1)]) for s in range(seats.core)]
    # Halving sends every element once but those the seat ends with. Doubling sends the block of 1, 2, 4, ... seats.
    halves = n - parts[seat]
    distances = [1 << k for k in range(seats.core.bit_length() - 1)]
    blocks = sum(sum(parts[seat - seat % d : seat - seat % d + d]) for d in distances)
    swapped = n * len(distances)
    sent = {
        ("all_reduce", "doubling"): swapped,
        ("all_reduce", "rabenseifner"): halves + blocks,
        ("reduce_scatter", "halving"): halves,
        ("all_gather", "doubling"): blocks,
    }[name, algorithm]
    return sent + (0 if guest is None else back)


def sent_by_hierarchical(n: int, nodes: int, per_node: int, rank: int) -> int:
    """Elements that `rank` sends in a hierarchical all-reduce of `n` elements, ranks of a node counted together.

    That is: the parts of a row cut by place in the node go round the node, one of them round the nodes, and back.
    """
    node, place = divmod(rank, per_node)
    inside = sent_elements("reduce_scatter", n, per_node, place) + sent_elements("all_gather", n, per_node, place)
    return inside + sent_elements("all_reduce", chunks(n, per_node)[place], nodes, node)
