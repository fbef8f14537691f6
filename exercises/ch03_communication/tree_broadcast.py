"""Broadcast and reduce along a binomial tree.

Write a broadcast in which ranks that have the tensor pass it on in every round, so that ceil(log2(ranks)) rounds
suffice, and a reduce that runs the same tree backwards. Together they are the trainer's all-reduce for
`--comm.algorithm tree`.

tensor: contiguous, of any shape, also empty; changed in place. src, dst: any group rank. group: the ranks that call it.
After tree_broadcast every rank has the tensor of rank src. After tree_reduce rank dst has the reduction by `op` ("sum",
"max", "min" or "product") over all ranks; the other ranks' tensors may hold anything. Both return None.
Example: 6 ranks, src 0. These ranks send in each round of one possible tree:
    round 1: 0 to 1; round 2: 0 to 2, 1 to 3; round 3: 0 to 4, 1 to 5
    if rank r has [r + 1.0]: after the broadcast [1.0] everywhere; after the reduce [21.0] on rank 0

Checked: tensors on 1 to 7 ranks, for every root and op; that each rank but the root receives (broadcast) or sends
(reduce) the tensor once; that ceil(log2(size)) rounds suffice; and every dtype, size and group, also groups that do not
begin at rank 0.

You may call:
    exchange(group, send=(tensor, peer), recv=(tensor, peer), op=op)   one round; each of the three may be left out;
        peers are group ranks; what arrives overwrites recv's tensor or, with op, is reduced into it
    group.rank, group.size   this rank's index in the group, and the number of ranks in it

Check it with: python -m exercises check tree_broadcast

Stub 4644cd83.
"""

from torch import Tensor

from minidist.comm import Group
from minidist.simple.collectives import exchange


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: reduce all ranks' `tensor` into rank `dst`'s; the other ranks' end up partially reduced.

    The rounds of `tree_broadcast` in the opposite order, each with its senders and receivers exchanged.
    """
    raise NotImplementedError("reduce along the same tree, towards `dst`")


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with rank `src`'s. In each round, every rank that has it sends it to one more."""
    raise NotImplementedError("broadcast along a tree: the number of ranks with the tensor doubles")
