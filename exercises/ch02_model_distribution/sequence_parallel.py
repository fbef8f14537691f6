"""Sequence parallelism: tokens sharded between the regions.

Outside of the tensor-parallel regions each of n ranks now has s / n consecutive tokens, in rank order. Write the two
collectives of such a region, and describe which shard of a parameter a rank holds and whether its gradient is partial.

gather: (b, s / n, h) -> (b, s, h), the tokens of all ranks. reduce: (b, s, h) -> (b, s / n, h), this rank's tokens of
the sum of x over the ranks. Each is one collective, takes fp32 or fp64 in any layout, and does not change x. The
inherited `enter` and `leave` use each of them as the backward of the other.
describe_shard: `own` is smaller than `full` in one dimension at most, which is divided evenly; if there are fewer
shards than ranks, consecutive ranks hold the same shard. `partial` says that the full gradient is the sum of the
holders' gradients; it is False for a single holder. The names of norms end in "norm.weight"; those of attention are
"model.layers.0.self_attn.q_proj.weight", and likewise with k_proj, v_proj and o_proj.
Example: 2 ranks, b = h = 1. Rank 0 gathers x = [[[1]]] and rank 1 [[[2]]]: both get [[[1], [2]]].
    Rank 0 reduces [[[1], [2]]] and rank 1 [[[10], [20]]]: rank 0 gets [[[11]]], rank 1 gets [[[22]]].
    On rank 1 of 4, k_proj with full = (8, 5) and own = (4, 5) has two shards:
    describe_shard returns ParamShard(Box((0, 0), (4, 5)), (0, 1), True).

Checked: both collectives; loss and gradients of a model on 1 to 4 ranks against one process in float64, with and
without sequence parallelism, with one key head per rank, several and fewer; the number of collectives, the bytes sent
and the tokens that a norm sees; every shard's box, holders and `partial`; and other batches, layouts and groups on 1 to
7 ranks.

You may call:
    ops.all_gather(x, key, n)   the ranks' x (m, ...) one after the other, (n m, ...); key is self.group.key
    ops.reduce_scatter(x, key, n)   this rank's n-th of the sum of x (n m, ...) over the ranks, (m, ...)
    Tensor.movedim(source, destination)   a view with one dimension in another place; group.rank, group.size
    ParamShard(box, holders, partial); Box(start, stop), one number per dimension; torch.Size.numel()

Check it with: python -m exercises check sequence_parallel

Stub aecb7697.
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
    raise NotImplementedError("return this rank's shard: its box, its holders, and whether its gradient is partial")


class SequenceParallelRegion(TensorParallelRegion):
    """A region outside of which each rank has its own tokens, (b, s / n, h): `gather` and `reduce` are collectives."""

    def gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError("return the tokens of all ranks, (b, s, h)")

    def reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError("return this rank's tokens of the sum over the ranks, (b, s / n, h)")
