"""Which replica differs, and in which tensor: the solution, as it stands in minidist.fault.simple.agreement.

The tensors themselves would be gigabytes; a digest of 8 bytes misses a difference once in 2^64. It must be computed
from the bytes: a sum does not see exchanged elements, and comparing numbers does not see the sign of a zero or the
bits of a NaN, which later steps may turn into differences that matter.

Only a strict majority can say which replica is wrong. If rank 0 were the reference, a fault of rank 0 would accuse
all others. With two replicas nothing but the difference is known. As every rank has all digests after one all-gather,
all ranks come to the same result without another message.

Usual wrong answers:
* the package's own
* names rank 3 only, in every tensor that differs
* the first 8 bytes of the tensor instead of a digest of all its bytes
* compares floating-point tensors only: counters and masks may differ
* takes half of the ranks for a majority
* hashes the memory as it lies: equal tensors of which one is transposed seem to differ
* takes the most frequent value as right, even if only half of the ranks have it
* adds 0 first, which turns -0.0 into 0.0: compares numbers and not bits
* one digest of all tensors: it finds the rank and cannot name the tensor
* one message per tensor
* each rank reports whether it differs itself, and knows nothing of the others
* compares with rank 0: a fault of rank 0 accuses all others
* converts to float32 first: the last bits of float64 are lost
* a sum as digest: it does not see exchanged elements
* hashes the numbers as text: all NaNs are one word
* sends all 32 bytes of each SHA-256
* sends the pickled contents of all tensors
* finds nothing anywhere
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from minidist.comm import Group, all_gather


def differing_replicas(tensors: Mapping[str, Tensor], group: Group) -> dict[str, list[int]]:
    """Collective: return which ranks differ from the others, and in which tensors: {name: ranks}, {} if all are equal.

    tensors: this rank's tensors, with the same names, shapes and dtypes on all ranks. Tensors are compared bit by bit,
    by 8 bytes of their SHA-256. A rank differs if more than half of the ranks have another value, equal among
    themselves; if no value has such a majority, all ranks are named.
    """
    contents = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    digests = [hashlib.sha256(content).digest() for content in contents]
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True) for digest in digests], dtype=torch.int64)
    table = torch.empty(group.size * len(mine), dtype=torch.int64)
    all_gather(table, mine, group)
    found = {}
    for name, column in zip(tensors, table.view(group.size, -1).T.tolist(), strict=True):
        [(value, votes)] = Counter(column).most_common(1)
        if votes < group.size:
            has_majority = 2 * votes > group.size
            found[name] = [rank for rank, each in enumerate(column) if each != value or not has_majority]
    return found
