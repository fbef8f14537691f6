"""Which replica differs, and in which tensor.

A flipped bit in one replica crashes nothing: its rank continues with parameters that differ from the others'. Compare
the tensors of all ranks, by digests of 8 bytes, and name the ranks and tensors that differ.

tensors: this rank's, by name, of any shape and dtype, equal in names and shapes on all ranks. Result: {name: ranks}.
Example: on 3 ranks, where rank 1 has bias = [0, 0.5] and the others [0, 0.25],
    differing_replicas({"weight": weight, "bias": bias}, group)   is {"bias": [1]} on every rank
On 2 ranks it is {"bias": [0, 1]}: the comparison cannot decide which of the two is right.

Checked: the result on 1 to 4 ranks, for each rank and tensor in turn, for every dtype, for tensors that differ in one
bit only, in their order, or in the sign of a zero; and by the messages: 8 bytes per tensor and rank, in one all-gather.

You may call:
    all_gather(output, input, group)   output (size * n,) of all ranks' input (n,), in rank order
    hashlib.sha256(data).digest()   32 bytes; data: bytes or a contiguous NumPy array
    Tensor.view(torch.uint8), Tensor.numpy(), int.from_bytes(data, "little", signed=True), Counter(values)

Check it with: python -m exercises check replica_digest

Stub 24ae3e24.
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
    raise NotImplementedError("compare digests of all ranks' tensors, and return which ranks differ, by tensor")
