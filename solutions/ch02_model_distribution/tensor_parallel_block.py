"""A tensor-parallel layer: feed-forward and attention: the solution, as it stands in minidist.parallel.tensor.simple.

A matrix that is sharded by output features gives each rank some features, complete, so an activation function can be
applied without communication. A second matrix that is sharded by input features takes exactly these features; its
outputs have the full shape and are terms of a sum. The two together cost one all-reduce in forward, and one in
backward where the input entered. In the opposite order a sum is needed before the activation function, because f(a +
b) is not f(a) + f(b).

Attention has the same form. Heads are independent of each other, so a rank computes some heads completely, and the
output projection adds up what they contribute. If there are fewer key and value heads than ranks, several ranks hold
the same head: each gets the gradient from its own query heads only, and the gradient reducer must sum these
gradients.

Usual wrong answers:
* sums the inner features of all ranks before the last matrix
* attention does not enter the region: the gradient of its input lacks the heads of the other ranks
* the package's own
* returns one number in every feature
* enters the region once for each projection: right values, but more all-reduces in backward
* rank r takes every n-th row from r on: the layer's output is right, but the shards are not consecutive
* gives rank r the key head r modulo their number, not the one that its query heads attend to
* shards keys and values over all ranks, and splits a head if there are fewer heads than ranks
* every rank holds all key and value heads, and its query heads attend to the first ones
* rotates the queries only
* sums attention's output a second time
* averages the partial outputs over the ranks
* shards a copy of the module, which itself keeps its full matrix
* does not enter the region: right outputs, but the input gets a partial gradient
* does not leave the region, so each rank keeps its partial output
* a shard of columns keeps the strides of its rows in a full copy
* uses the rank among all processes as the rank in the group
* stores its shards in float32, whatever the dtype of the weights
* shards the first matrices by input features and the last by output features
* also sums the inner features, for no purpose
* calls torch's attention itself, so that context parallelism has no effect
* the shard is a view, which keeps the full matrix in memory
* returns zeros
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.models.layers import Attention, Rotary, apply_rotary
from minidist.parallel.tensor.simple import TensorParallelRegion


def shard(module: nn.Module, dim: int, group: Group, num_shards: int | None = None) -> nn.Module:
    """Replace `module.weight` by this rank's shard along `dim`; consecutive ranks share one if there are fewer."""
    own = module.weight.detach().chunk(parts := num_shards or group.size, dim)[group.rank * parts // group.size]
    module.weight = nn.Parameter(own.clone(memory_format=torch.contiguous_format))
    return module


class TensorParallelMLP(nn.Module):
    """The feed-forward layer `mlp`, `down_proj(silu(gate_proj(x)) * up_proj(x))`, with its inner features sharded."""

    def __init__(self, mlp: nn.Module, region: TensorParallelRegion):
        super().__init__()
        self.gate_proj, self.up_proj = (shard(linear, 0, region.group) for linear in (mlp.gate_proj, mlp.up_proj))
        self.region, self.down_proj = region, shard(mlp.down_proj, 1, region.group)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.region.enter(hidden)
        return self.region.leave(self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class TensorParallelAttention(nn.Module):
    """The layer `attention`; each rank has consecutive query heads, and the key and value heads that they attend to."""

    attend = Attention.attend  # context parallelism replaces it

    def __init__(self, attention: nn.Module, region: TensorParallelRegion):
        super().__init__()
        self.region, self.head_dim, group = region, attention.head_dim, region.group
        self.q_proj, self.o_proj = shard(attention.q_proj, 0, group), shard(attention.o_proj, 1, group)
        parts = min(group.size, attention.k_proj.weight.shape[0] // self.head_dim)  # no head is split
        self.k_proj, self.v_proj = (shard(each, 0, group, parts) for each in (attention.k_proj, attention.v_proj))

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        hidden = self.region.enter(hidden)
        q, k, v = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = self.attend(*(x.transpose(1, 2) for x in (apply_rotary(q, rotary), apply_rotary(k, rotary), v)))
        return self.region.leave(self.o_proj(mixed.transpose(1, 2).flatten(2)))
