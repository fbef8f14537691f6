"""Which rank computes the update of which matrix when matrices are sharded (Muon). Free of torch, for the estimate.

Muon's update needs the full matrix, and under ZeRO or tensor parallelism every rank holds shards. So each matrix has an
owner: one holder of each shard sends it, the owner computes the update, and sends every holder its shard of that. A
rank sends each of its own shards at most once and receives as much, whatever the number of ranks; nothing is padded and
nothing is computed twice. (Liu et al. 2025, arXiv 2502.16982, section 2.3, gather every matrix on all ranks that hold a
shard of it.)
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixShard:
    """One rank's shard of a matrix. key: equal on ranks that hold the same elements. numel: number of elements."""

    key: Hashable
    numel: int


@dataclass(frozen=True)
class MatrixPlan:
    """Which ranks hold each sharded matrix, and which rank, its owner, computes the update of the full matrix.

    holders_by_matrix: for each matrix, by name, its shards by rank. owner_by_matrix: the owner of each matrix, by name.
    All ranks are group ranks.
    """

    holders_by_matrix: Mapping[str, Mapping[int, MatrixShard]]
    owner_by_matrix: Mapping[str, int]

    def sender_ranks(self, name: str) -> list[int]:
        """Return the ranks that send their shards of matrix `name` to the owner: the first holder of each shard."""
        first: dict[Hashable, int] = {}
        for rank, shard in self.holders_by_matrix[name].items():
            first.setdefault(shard.key, rank)
        return list(first.values())


def assign_matrix_owners(shards: Sequence[Mapping[str, MatrixShard]]) -> MatrixPlan:
    """Assign matrices to owners, the largest first, each to the rank that owns the fewest elements so far.

    The owner of a matrix is the rank that computes Muon's update of the full matrix for all ranks that hold shards.
    shards: for every rank of the group, in rank order, its shard of each matrix by name.
    """
    holders: dict[str, dict[int, MatrixShard]] = {}
    for rank, held in enumerate(shards):
        for name, shard in held.items():
            holders.setdefault(name, {})[rank] = shard
    sizes = {}
    for name, of_ranks in holders.items():  # ranks with equal keys hold the same elements
        sizes[name] = sum({shard.key: shard.numel for shard in of_ranks.values()}.values())
    owned = [0] * len(shards)
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = owned.index(min(owned))
        owned[owner[name]] += sizes[name]
    return MatrixPlan(dict(sorted(holders.items())), owner)
