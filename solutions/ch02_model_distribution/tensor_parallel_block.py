"""A tensor-parallel layer: feed-forward and attention: the solution, as it stands in minidist.simple.tensor_parallel.

A matrix that is sharded by output features gives each rank some features, complete, so an activation function can be
applied without communication. A second matrix that is sharded by input features takes exactly these features; its
outputs have the full shape and are terms of a sum. The two together cost one all-reduce in forward, and one in
backward where the input entered. In the opposite order a sum is needed before the activation function, because f(a +
b) is not f(a) + f(b).

Attention has the same form. Heads are independent of each other, so a rank computes some heads completely, and the
output projection adds up what they contribute. If there are fewer key and value heads than ranks, several ranks hold
the same head: each gets the gradient from its own query heads only. A hook sums the gradients inside backward, so
that whatever reads the gradient later (the reducer, the norm for clipping, the optimizer) sees the same one on all of
them.

Usual wrong answers:
* attention does not enter the region: the gradient of its input lacks the heads of the other ranks
* the package's own
* returns one number in every feature
* leaves the loop at the first frozen parameter, and so forgets those after it
* enters the region once for each projection: right values, but more all-reduces in backward
* rank r takes every n-th row from r on: the layer's output is right, but the shards are not consecutive
* leaves the loop after the first parameter
* copies nothing if the shard is the full matrix, with whose memory it then goes on
* puts the shard into the full parameter, which a tied module then shards again
* gives rank r the key head r modulo their number, not the one that its query heads attend to
* shards keys and values over all ranks, and splits a head if there are fewer heads than ranks
* sets a hook on a parameter that gets no gradient
* sums the inner features of all ranks before the last matrix, for no purpose
* every rank holds all key and value heads, and its query heads attend to the first ones
* rotates the queries only
* sums attention's output a second time
* averages the partial outputs over the ranks
* averages the gradients of a shared head
* shards a copy of the module, which itself keeps its full matrix
* does not enter the region: right outputs, but the input gets a partial gradient
* does not leave the region, so each rank keeps its partial output
* a shard of columns keeps the strides of its rows in a full copy
* uses the rank among all processes as the rank in the group
* stores its shards in float32, whatever the dtype of the weights
* shards the first matrices by input features and the last by output features
* also sums the inner features, for no purpose
* forgets that the full matrix was frozen
* keeps the partial gradients of key and value heads that several ranks hold: their replicas drift apart
* calls torch's attention itself, so that context parallelism has no effect
* sums what has accumulated in .grad: from the second backward on, earlier gradients are summed once more
* sums the gradients of a shared head over all ranks of the region, also those that hold another head
* sums the gradients of shared key heads, and forgets the value heads
* the shard is a view, which keeps the full matrix in memory
* returns zeros
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.models.layers import Attention, Rotary, apply_rotary
from minidist.simple.tensor_parallel import Region, sum_over_ranks


def shard_weight(module: nn.Module, dim: int, group: Group, num_shards: int | None = None) -> nn.Module:
    """Replace `module.weight` by this rank's shard of it, cut along `dim`; return the module.

    num_shards: one per rank by default; of fewer, consecutive ranks have the same one.
    """
    num_shards = num_shards or group.size
    own = module.weight.detach().chunk(num_shards, dim)[group.rank * num_shards // group.size]
    module.weight = nn.Parameter(own.clone(memory_format=torch.contiguous_format), module.weight.requires_grad)
    return module


def sum_replica_gradients(group: Group, *parameters: nn.Parameter) -> None:
    """Sum the gradients of some parameters over the ranks of `group`, inside backward.

    For replicas that work on different heads or tokens: each rank's gradient is a partial sum. Frozen ones have none.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(partial(sum_over_ranks, group=group))


class TensorParallelMLP(nn.Module):
    """The feed-forward layer `down_proj(silu(gate_proj(x)) * up_proj(x))`; each rank has 1/n of the inner features."""

    def __init__(self, mlp: nn.Module, region: Region):
        super().__init__()
        self.region = region
        self.gate_proj = shard_weight(mlp.gate_proj, 0, region.group)
        self.up_proj = shard_weight(mlp.up_proj, 0, region.group)
        self.down_proj = shard_weight(mlp.down_proj, 1, region.group)

    def forward(self, hidden: Tensor) -> Tensor:
        """Collective: apply the layer: (b, s, h) -> (b, s, h); both are (b, s / n, h) with sequence parallelism."""
        hidden = self.region.enter(hidden)
        inner = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)  # (b, s, inner / n), complete
        return self.region.leave(self.down_proj(inner))  # a partial sum over the inner features


class TensorParallelAttention(nn.Module):
    """Attention; each rank has consecutive query heads, and the key and value heads to which they belong.

    With fewer key-value heads than ranks, several ranks hold a replica of the same head. heads_group: these ranks, None
    if this rank is the only one.
    """

    attend = Attention.attend  # context parallelism replaces it

    def __init__(self, attention: nn.Module, region: Region, heads_group: Group | None):
        super().__init__()
        self.region, self.head_dim = region, attention.head_dim
        kv_shards = min(region.group.size, attention.k_proj.out_features // self.head_dim)  # no head is split
        self.q_proj = shard_weight(attention.q_proj, 0, region.group)
        self.k_proj = shard_weight(attention.k_proj, 0, region.group, kv_shards)
        self.v_proj = shard_weight(attention.v_proj, 0, region.group, kv_shards)
        self.o_proj = shard_weight(attention.o_proj, 1, region.group)
        if heads_group is not None:  # each replica sees the query heads of its rank
            sum_replica_gradients(heads_group, self.k_proj.weight, self.v_proj.weight)

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Collective: apply the layer; shapes as in `TensorParallelMLP.forward`. rotary: always for all s tokens."""
        hidden = self.region.enter(hidden)
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # (b, s, heads / n, d)
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        mixed = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.region.leave(self.o_proj(mixed.transpose(1, 2).flatten(2)))
