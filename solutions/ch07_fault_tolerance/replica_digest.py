"""Which replica differs, and in which tensor: the solution, as it stands in minidist.simple.recovery.

The tensors themselves would be gigabytes; a digest of 8 bytes misses a difference once in 2^64. It must be computed
from the bytes: a sum does not see exchanged elements, and comparing numbers does not see the sign of a zero or the
bits of a NaN, which later steps may turn into differences that matter.

Only a strict majority can say which replica is wrong. If rank 0 were the reference, a fault of rank 0 would accuse
all others. With two replicas nothing but the difference is known. As every rank has all digests after one all-gather,
all ranks come to the same result without another message.

Usual wrong answers:
* compares all ranks that have a tensor of the name, also those with another part of it
* hashes the first 64 KiB of a tensor: differences behind them are not found
* the package's own
* names rank 3 only, in every tensor that differs
* the first 8 bytes of the tensor instead of a digest of all its bytes
* takes the positions in the group for global ranks
* takes half of the ranks for a majority
* asks for a majority of the ranks that have the tensor, not of all that must have it: with two of four it names the
  other two
* hashes the memory as it lies: equal tensors of which one is transposed seem to differ
* takes the most frequent value as right, even if only half of the ranks have it
* adds 0 first, which turns -0.0 into 0.0: compares numbers and not bits
* one all-gather per tensor
* knows one set of replicas per name: that of the last rank
* each rank reports whether it differs itself, and knows nothing of the others
* compares only what this rank has: the ranks come to different results
* compares with the first rank: a fault of that rank accuses all others
* converts to float32 first: the last bits of float64 are lost
* views a vector as bytes that has gaps between its elements
* a sum as digest: it does not see exchanged elements
* all 32 bytes of the SHA-256
* gathers all tensors, and computes every digest on every rank
* finds nothing anywhere
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from minidist.comm import Group, all_gather_object


def tensor_digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bits: the first 8 bytes of their SHA-256."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)  # even of one strided element
    return hashlib.sha256(flat.view(torch.uint8).numpy()).digest()[:8]


def differing_replicas(tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], group: Group) -> dict[str, list[int]]:
    """Collective: return which ranks differ from their replicas, and in which tensors: {name: global ranks}.

    tensors: this rank's, by name, each with the global ranks that must have the same bits. If more than half of these
    have equal bits, the others differ; if not, all are named. The result is the same on all ranks of `group`.
    """
    own = {(name, ranks): tensor_digest(tensor) for name, (tensor, ranks) in tensors.items() if len(ranks) > 1}
    digests = dict(zip(group.ranks, all_gather_object(own, group), strict=True))
    found = defaultdict(set)
    for name, ranks in set().union(*digests.values()):
        column = {rank: digests[rank].get((name, ranks)) for rank in ranks}
        [(value, votes)] = Counter(digest for digest in column.values() if digest).most_common(1)
        if votes < len(ranks):
            found[name] |= {rank for rank in ranks if column[rank] != value or 2 * votes <= len(ranks)}
    return {name: sorted(found[name]) for name in sorted(found)}
