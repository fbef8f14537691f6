"""How many elements one rank sends: the one table of wire traffic that meter, estimate and grader share.

`numel` is the number of elements, `group_size` the number of ranks, `rank` this rank's index in the group. The numbers
are exact for the named algorithm, uneven chunk sizes included; they are not averages. A library may use another
algorithm than the table assumes, so the figure for a library's collective is *modelled*; for send and recv it is
*counted*.

Algorithms: ring, Patarasuk and Yuan 2009, section 3; the others, Thakur et al. 2005, section 4.
"""

from collections.abc import Sequence

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

# Operations whose bytes are always counted; those of a collective are modelled unless its algorithm is known.
COUNTED_OPERATIONS = frozenset({"send", "recv"})

INT8_BLOCK = 256  # values with one scale in `quantized.all_reduce_int8`


def chunk_sizes(numel: int, num_chunks: int) -> list[int]:
    """Return the lengths of `num_chunks` consecutive chunks of `numel` elements.

    The first `numel % num_chunks` chunks have one element more than the others.
    """
    part, rest = divmod(numel, num_chunks)
    return [part + (i < rest) for i in range(num_chunks)]


def int8_chunk_bytes(numel: int, group_size: int) -> int:
    """Return the bytes of one rank's chunk of `numel` values as int8, in whole blocks with a float32 scale each."""
    return -(-numel // (group_size * INT8_BLOCK)) * (INT8_BLOCK + 4)


def sent_elements(
    operation: str, numel: int, group_size: int, rank: int, *, root: int = 0, splits: Sequence[int] | None = None
) -> int:
    """Return how many elements `rank` sends in one operation, by its algorithm in `ASSUMED_ALGORITHMS`.

    operation: a key of `ASSUMED_ALGORITHMS`.
    numel: elements of the tensor of all_reduce, reduce, broadcast, send and recv; of the full input of reduce_scatter
        and all_to_all; of the full output of all_gather; of one rank's part in gather and scatter.
    root: group rank of the root of broadcast, reduce, gather and scatter.
    splits: elements this rank sends to each rank in all_to_all; equal parts when None.
    """
    if group_size == 1:
        return 0
    relative = (rank - root) % group_size
    match operation:
        case "all_reduce":
            # The ring's reduce-scatter sends every chunk but the one this rank completes, its all-gather every chunk
            # but the one the next rank has completed.
            parts = chunk_sizes(numel, group_size)
            return 2 * numel - parts[(rank + 1) % group_size] - parts[(rank + 2) % group_size]
        case "reduce_scatter":
            return numel - chunk_sizes(numel, group_size)[rank]
        case "all_gather":
            return numel - chunk_sizes(numel, group_size)[(rank + 1) % group_size]
        case "broadcast":
            # In the binomial tree the rank at distance v from the root sends to v + 2^k for every 2^k above v.
            distances = [1 << k for k in range(group_size.bit_length())]
            return numel * sum(relative < distance < group_size - relative for distance in distances)
        case "reduce" | "gather":
            return numel if relative else 0
        case "scatter":
            return 0 if relative else numel * (group_size - 1)
        case "all_to_all":
            parts = chunk_sizes(numel, group_size) if splits is None else splits
            return sum(parts) - parts[rank]
        case "send":
            return numel
        case "recv" | "barrier":
            return 0
    raise ValueError(f"no operation {operation!r}: the table knows {', '.join(ASSUMED_ALGORITHMS)}")
