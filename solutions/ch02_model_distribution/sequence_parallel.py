"""Sequence parallelism: tokens sharded between the regions: the solution, as it stands in
minidist.parallel.tensor.simple.

In plain tensor parallelism every rank computes the norms on all tokens: the work is repeated, and every rank keeps
the same activations. With the sequence sharded between the tensor-parallel regions, each rank normalizes its own
tokens. An all-reduce is a reduce-scatter followed by an all-gather, so the number of bytes sent does not grow. The
two collectives are also each other's backward: every token's gradient is a sum over the ranks that used the token,
and returns to the rank that has it.

The price is one more case to handle. The weight of a norm is replicated, but each rank now applies it to some of the
tokens, so its gradient is partial. Without a sum over the ranks the replicas of the norms diverge while the loss
falls; Megatron-LM and GPT-NeoX both shipped this bug. Here the parameter's description says `partial`, and the
gradient reducer sums every gradient that is marked so.

Usual wrong answers:
* all-reduces, and then takes its own tokens: right values, and twice the bytes of a reduce-scatter
* marks the norms as partial without sequence parallelism, too
* reshapes the gathered tensor where dimensions must be moved: right for a batch of one
* gathers along the batch: the first dimension of x, not that of the tokens
* calls the package's own class and function
* returns one number for every feature, and one description for every parameter
* fails for x that is not contiguous
* names all ranks as holders of a replicated head
* marks every gradient as partial under sequence parallelism, also those of a single holder
* marks the norms of the first layer and the last norm, and forgets the other layers
* gathers by a sum of tensors that are zero outside of each rank's tokens: twice the bytes of an all-gather
* marks only the norms, and forgets key and value heads with several holders
* gives rank r the shard r modulo their number
* takes replicated heads for complete under sequence parallelism, since every region sees all tokens
* marks the key heads and forgets the value heads
* forgets the norm after the last layer
* marks the last norm only
* marks no norm, so the replicas of the norms diverge
* describes the holders by a list, which two descriptions cannot be compared by
* averages the partial results
* deals out the tokens: rank r gets every n-th one, and `gather` puts them one after the other
* keeps its own tokens of its own partial result, and sums nothing
* takes the rank as the number of the shard, even if there are fewer shards than ranks
* uses the rank among all processes as the rank in the group
* takes every weight as sharded by rows; the last matrices of a region are sharded by columns
* sends float32, whatever the dtype of x
* is plain tensor parallelism under another name: every norm sees all tokens
* starts every box at the number of the shard, not at that number times the size of a shard
* one all-gather per token: the same bytes, in many small collectives
* names holders by their ranks among all processes
* returns zeros and empty boxes
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.tensor.simple import TensorParallelRegion
from minidist.parallel.tensor.split import ParamShard
from minidist.parameters import Box


def describe_shard(name: str, full: torch.Size, own: torch.Size, group: Group, sequence_parallel: bool) -> ParamShard:
    """Return which shard of a parameter of shape `full` this rank holds, from the shape `own` of its shard."""
    index = group.rank * (num_shards := full.numel() // own.numel()) // group.size
    holders = tuple(rank for rank in range(group.size) if rank * num_shards // group.size == index)
    start = tuple(index * a if a < b else 0 for a, b in zip(own, full, strict=True))
    # Replicas of a key or value head serve different query heads; those of a norm see different tokens, if sharded.
    is_partial = len(holders) > 1 and (".self_attn." in name or sequence_parallel and "norm." in name)
    return ParamShard(Box(start, tuple(map(sum, zip(start, own, strict=True)))), holders, is_partial)


class SequenceParallelRegion(TensorParallelRegion):
    """A region outside of which each rank has its own tokens, (b, s / n, h): `gather` and `reduce` are collectives."""

    def gather(self, x: Tensor) -> Tensor:
        return ops.all_gather(x.movedim(1, 0), self.group.key, self.group.size).movedim(0, 1)

    def reduce(self, x: Tensor) -> Tensor:
        return ops.reduce_scatter(x.movedim(1, 0), self.group.key, self.group.size).movedim(0, 1)
