"""Which replica differs, and in which tensor.

A flipped bit in one replica crashes nothing: its rank continues with parameters that differ from the others'. Compare
the tensors of all ranks, by digests of 8 bytes, and name the ranks and tensors that differ.

tensors: this rank's, {name: (tensor, ranks)}: a tensor of any shape and dtype, and a tuple of the global ranks that
must have the same bits, with tensor parallelism not all. A tensor whose ranks are this rank alone has no replica and is
not compared. Result: {name: ascending global ranks}, on all ranks of the group, {} if all replicas are equal.

Example: 3 ranks with the same parameters; rank 1 has bias = [0, 0.5] and the others have [0, 0.25]:
    differing_replicas({"weight": (weight, (0, 1, 2)), "bias": (bias, (0, 1, 2))}, group)   is {"bias": [1]} on all
With a bias on the ranks (0, 1) only, it is {"bias": [0, 1]}: nobody knows which of two replicas is right.
    tensor_digest(torch.zeros(2))   is af5570f5a1810b7a in hexadecimal, the beginning of the SHA-256 of 8 bytes of zeros

Checked: the digest of every dtype, also of transposed tensors and of every second element of one; the result on 1 to 4
ranks, for each rank and tensor in turn, for tensors that differ in one bit only, in their order, or in the sign of a
zero; without a majority; for sets of replicas, of which several may have tensors of one name, as (0, 2) and (1, 3); a
rank that lacks a tensor of which more than half of its ranks have equal replicas, and so differs; a group of some of
the ranks; that no tensor changes; and that the bytes sent do not depend on the sizes of the tensors, nor the number of
collectives on their number.

You may call:
    all_gather_object(value, group) -> list   the values of all ranks, in the order of group.ranks, their global ranks
    hashlib.sha256(data).digest()   32 bytes; data: bytes or a contiguous NumPy array
    Tensor.contiguous(), Tensor.view(-1), Tensor.view(torch.uint8), Tensor.numpy(), Counter(values).most_common(1)

Check it with: python -m exercises check replica_digest

Stub 8305d783.
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
    raise NotImplementedError("return the first 8 bytes of the SHA-256 of the tensor's bits")


def differing_replicas(tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], group: Group) -> dict[str, list[int]]:
    """Collective: return which ranks differ from their replicas, and in which tensors: {name: global ranks}.

    tensors: this rank's, by name, each with the global ranks that must have the same bits. If more than half of these
    have equal bits, the others differ; if not, all are named. The result is the same on all ranks of `group`.
    """
    raise NotImplementedError("compare digests of all ranks' tensors, and return which ranks differ, by tensor")
