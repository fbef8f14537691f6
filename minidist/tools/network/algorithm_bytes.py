"""How many elements one rank sends in a collective of `comm/algorithms`: predicts what the meter counts. No torch.

`numel` is the number of elements, `group_size` the number of ranks, `rank` this rank's index in the group. The numbers
are exact, uneven chunk sizes included. Patarasuk and Yuan 2009, section 3 (ring); Thakur et al. 2005, section 4.
"""

from collections.abc import Sequence

from minidist.comm.power_of_two import PowerOfTwoRanks
from minidist.comm.wire_bytes import chunk_sizes, sent_elements

# By operation, the algorithms of `comm/algorithms`.
IMPLEMENTED_ALGORITHMS = {
    "broadcast": ("flat", "tree"),
    "reduce": ("flat", "tree"),
    "parameter_server_step": ("flat",),
    "all_gather": ("ring", "doubling"),
    "reduce_scatter": ("ring", "halving"),
    "all_reduce": ("naive", "tree", "ring", "doubling", "rabenseifner"),
    "all_to_all": ("pairwise",),
}


def sent_elements_by_algorithm(
    operation: str,
    algorithm: str,
    numel: int,
    group_size: int,
    rank: int,
    *,
    root: int = 0,
    splits: Sequence[int] | None = None,
) -> int:
    """Return how many elements `rank` sends in one collective if it runs by `algorithm`. Exact, for uneven chunks too.

    algorithm: one of `IMPLEMENTED_ALGORITHMS[operation]`. rank: group rank. numel: elements of the tensor of
    all_reduce, reduce and broadcast; of the full input of reduce_scatter and all_to_all; of the full output of
    all_gather; of the parameters for "parameter_server_step". root: group rank of the root. splits: elements this rank
    sends to each rank in all_to_all; None: equal parts. Raises ValueError if the operation has no such algorithm.
    """
    if algorithm not in IMPLEMENTED_ALGORITHMS.get(operation, ()):
        known = "; ".join(f"{operation}: {', '.join(names)}" for operation, names in IMPLEMENTED_ALGORITHMS.items())
        raise ValueError(f"no algorithm {algorithm!r} for {operation!r}: there are {known}")
    if group_size == 1:
        return 0
    match operation, algorithm:
        case ("broadcast", "flat") | ("parameter_server_step", _):
            # The root sends to all ranks; in a parameter-server step the others first send it their gradients.
            return numel * (group_size - 1) if rank == root else numel * (operation == "parameter_server_step")
        case "all_reduce", "naive":
            return numel * (group_size - 1)
        case "all_reduce", "tree":
            return sent_elements("reduce", numel, group_size, rank) + sent_elements(
                "broadcast", numel, group_size, rank
            )
        case (_, "doubling") | (_, "halving") | (_, "rabenseifner"):
            return _sent_by_halving_doubling(operation, algorithm, numel, group_size, rank)
    return sent_elements(operation, numel, group_size, rank, root=root, splits=splits)


def _sent_by_halving_doubling(operation: str, algorithm: str, numel: int, group_size: int, rank: int) -> int:
    """A folded rank sends its input; its partner exchanges with the active ranks and sends the folded rank's result."""
    active, parts = PowerOfTwoRanks(group_size), chunk_sizes(numel, group_size)
    if active.is_folded(rank):
        return parts[rank] if operation == "all_gather" else numel
    folded, index = active.folded_partner(rank), active.index(rank)
    if operation == "all_reduce":
        parts, back = chunk_sizes(numel, active.count), numel
    else:
        back = 0 if folded is None else parts[folded] if operation == "reduce_scatter" else numel - parts[folded]
        parts = [sum(parts[active.rank(s) : active.rank(s + 1)]) for s in range(active.count)]
    # Halving sends every element once but those of the rank's own shard; doubling sends blocks of 1, 2, 4, ... shards.
    halves = numel - parts[index]
    distances = [1 << k for k in range(active.count.bit_length() - 1)]
    blocks = sum(sum(parts[index - index % d : index - index % d + d]) for d in distances)
    swapped = numel * len(distances)
    sent = {
        ("all_reduce", "doubling"): swapped,
        ("all_reduce", "rabenseifner"): halves + blocks,
        ("reduce_scatter", "halving"): halves,
        ("all_gather", "doubling"): blocks,
    }[operation, algorithm]
    return sent + (0 if folded is None else back)


def sent_elements_hierarchical(numel: int, num_nodes: int, ranks_per_node: int, rank: int) -> int:
    """Return how many elements global rank `rank` sends in a hierarchical all-reduce of `numel` elements.

    Node i has the ranks from `i * ranks_per_node` on. The ranks of a node reduce-scatter, ranks of equal local rank
    all-reduce their shards between the nodes, and the ranks of a node all-gather.
    """
    node, local_rank = divmod(rank, ranks_per_node)
    inside = sent_elements("reduce_scatter", numel, ranks_per_node, local_rank) + sent_elements(
        "all_gather", numel, ranks_per_node, local_rank
    )
    return inside + sent_elements("all_reduce", chunk_sizes(numel, ranks_per_node)[local_rank], num_nodes, node)
