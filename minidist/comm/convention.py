"""How many bytes one rank puts on the wire: the one table that meter, estimate and grader share.

`n` counts elements, `size` the ranks of the group and `rank` the place of this one. The figures are exact for the
named algorithm, with the chunk sizes that an uneven cut really has; they are not averages. A library may use another
algorithm than the one named here, so a figure for its collective is *modelled*; for a transfer it is what was sent.

Algorithms: ring, Patarasuk and Yuan 2009, section 3; binomial tree, Thakur et al. 2005, section 3.
"""

from collections.abc import Sequence

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
