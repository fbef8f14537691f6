"""How many elements one rank sends: the one table of wire traffic that meter, estimate and grader share.

`n` is the number of elements, `size` the number of ranks of the group, `rank` this rank's index in it. The figures are
exact for the named algorithm, uneven chunk sizes included; they are not averages. A library may use another algorithm
than the table assumes, so the figure for a library's collective is *modelled*; for send and recv it is *counted*.

Algorithms: ring, Patarasuk and Yuan 2009, section 3; the others, Thakur et al. 2005, section 4. Those of
`comm/algorithms` (`IMPLEMENTED_ALGORITHMS`) are built on send and receive: `sent_elements_by_algorithm` predicts what
the meter counts.
"""

from collections.abc import Sequence

from minidist.comm.power_of_two import PowerOfTwoRanks

# The algorithm that a library's collective is assumed to use.
ASSUMED_ALGORITHMS = {
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

# Operations whose bytes are counted; those of a collective are modelled.
COUNTED_OPERATIONS = frozenset({"send", "recv"})

IMPLEMENTED_ALGORITHMS = {
    "broadcast": ("flat", "tree"),
    "reduce": ("flat", "tree"),
    "central_update": ("flat",),
    "all_gather": ("ring", "doubling"),
    "reduce_scatter": ("ring", "halving"),
    "all_reduce": ("naive", "tree", "ring", "doubling", "rabenseifner"),
    "all_to_all": ("pairwise",),
}


def chunk_sizes(n: int, size: int) -> list[int]:
    """Sizes of `size` consecutive chunks of `n` elements; the first `n % size` chunks have one element more."""
    part, rest = divmod(n, size)
    return [part + (i < rest) for i in range(size)]


def sent_elements(
    name: str, n: int, size: int, rank: int, *, root: int = 0, splits: Sequence[int] | None = None
) -> int:
    """Return how many elements `rank` sends in one operation `name`, by the algorithm in `ASSUMED_ALGORITHMS`.

    n: elements of the tensor of all_reduce, reduce, broadcast, send and recv; of the full input of reduce_scatter and
        all_to_all; of the full output of all_gather; of one rank's part in gather and scatter.
    root: group rank of the root of broadcast, reduce, gather and scatter.
    splits: elements this rank sends to each rank in all_to_all; equal parts when None.
    """
    if size == 1:
        return 0
    relative = (rank - root) % size
    match name:
        case "all_reduce":
            # The ring's reduce-scatter sends every chunk but the one this rank completes, its all-gather every chunk
            # but the one the next rank has completed.
            parts = chunk_sizes(n, size)
            return 2 * n - parts[(rank + 1) % size] - parts[(rank + 2) % size]
        case "reduce_scatter":
            return n - chunk_sizes(n, size)[rank]
        case "all_gather":
            return n - chunk_sizes(n, size)[(rank + 1) % size]
        case "broadcast":
            # In the binomial tree the rank at distance v from the root sends to v + 2^k for every 2^k above v.
            return n * sum(1 for k in range(size.bit_length()) if (1 << k) > relative and relative + (1 << k) < size)
        case "reduce" | "gather":
            return n if relative else 0
        case "scatter":
            return 0 if relative else n * (size - 1)
        case "all_to_all":
            parts = chunk_sizes(n, size) if splits is None else splits
            return sum(parts) - parts[rank]
        case "send":
            return n
        case "recv" | "barrier":
            return 0
    raise ValueError(f"no operation {name!r}: the table knows {', '.join(ASSUMED_ALGORITHMS)}")


def sent_elements_by_algorithm(
    name: str, algorithm: str, n: int, size: int, rank: int, *, root: int = 0, splits: Sequence[int] | None = None
) -> int:
    """Return how many elements `rank` sends in one operation by an algorithm of `IMPLEMENTED_ALGORITHMS`.

    Arguments as in `sent_elements`; n of a central update: number of parameters. Raises ValueError for an unknown one.
    """
    if algorithm not in IMPLEMENTED_ALGORITHMS.get(name, ()):
        known = "; ".join(f"{operation}: {', '.join(names)}" for operation, names in IMPLEMENTED_ALGORITHMS.items())
        raise ValueError(f"no algorithm {algorithm!r} for {name!r}: there are {known}")
    if size == 1:
        return 0
    match name, algorithm:
        case ("broadcast", "flat") | ("central_update", _):
            # The root sends to all ranks; in a central update the others first send it their gradients.
            return n * (size - 1) if rank == root else n * (name == "central_update")
        case "all_reduce", "naive":
            return n * (size - 1)
        case "all_reduce", "tree":
            return sent_elements("reduce", n, size, rank) + sent_elements("broadcast", n, size, rank)
        case (_, "doubling") | (_, "halving") | (_, "rabenseifner"):
            return _sent_by_halving_doubling(name, algorithm, n, size, rank)
    return sent_elements(name, n, size, rank, root=root, splits=splits)


def _sent_by_halving_doubling(name: str, algorithm: str, n: int, size: int, rank: int) -> int:
    """A folded rank sends its input; its partner exchanges with the active ranks and sends the folded rank's result."""
    active, parts = PowerOfTwoRanks(size), chunk_sizes(n, size)
    if active.is_folded(rank):
        return parts[rank] if name == "all_gather" else n
    folded, index = active.folded_partner(rank), active.index(rank)
    if name == "all_reduce":
        parts, back = chunk_sizes(n, active.count), n
    else:
        back = 0 if folded is None else parts[folded] if name == "reduce_scatter" else n - parts[folded]
        parts = [sum(parts[active.rank(s) : active.rank(s + 1)]) for s in range(active.count)]
    # Halving sends every element once but those of the rank's own shard; doubling sends blocks of 1, 2, 4, ... shards.
    halves = n - parts[index]
    distances = [1 << k for k in range(active.count.bit_length() - 1)]
    blocks = sum(sum(parts[index - index % d : index - index % d + d]) for d in distances)
    swapped = n * len(distances)
    sent = {
        ("all_reduce", "doubling"): swapped,
        ("all_reduce", "rabenseifner"): halves + blocks,
        ("reduce_scatter", "halving"): halves,
        ("all_gather", "doubling"): blocks,
    }[name, algorithm]
    return sent + (0 if folded is None else back)


def sent_elements_hierarchical(n: int, nodes: int, per_node: int, rank: int) -> int:
    """Return how many elements `rank` sends in a hierarchical all-reduce of `n` elements, ranks numbered by node."""
    node, local_rank = divmod(rank, per_node)
    inside = sent_elements("reduce_scatter", n, per_node, local_rank) + sent_elements(
        "all_gather", n, per_node, local_rank
    )
    return inside + sent_elements("all_reduce", chunk_sizes(n, per_node)[local_rank], nodes, node)
