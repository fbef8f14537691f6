"""A tensor-parallel layer: feed-forward and attention.

A layer of a Transformer is too large for one rank. Write both of its halves with the matrices sharded over the n ranks
of a region, so that each half needs one all-reduce in forward and one in backward.

mlp: a module with gate_proj, up_proj (f, h) and down_proj (h, f). attention: one with q_proj (heads d, h), k_proj and
v_proj (kv_heads d, h), o_proj (h, heads d) and head_dim d. n divides f, heads and either kv_heads or, if there are
fewer of them, kv_heads divides n. `hidden` and the result are (b, s, h), and rotary is what apply_rotary takes.
Example: 8 query heads and 2 key and value heads of d = 4 features on 4 ranks.
    Rank 1 holds rows 8 to 15 of q_proj (query heads 2 and 3), columns 8 to 15 of o_proj, and rows 0 to 3 of k_proj and
    v_proj (key and value head 0, which rank 0 holds as well). With f = 12 it holds rows 3 to 5 of gate_proj.
    shard(nn.Linear(5, 12), 0, group).weight has the shape (3, 5) on every rank.

Checked: output, shards and gradients on 1 to 4 ranks against one process in float64, for one key head per rank, several
and fewer; the gradient of a key head that several ranks hold, summed over them; the collectives and their shapes; that
a shard is contiguous and no view of the full matrix, in the module that `shard` was given; that attention calls
`attend` with this rank's heads; a region with the sequence sharded; and the feed-forward layer for any number of
tokens on 1 to 7 ranks.

You may call:
    region.enter(x), region.leave(x)   the two ends of the region: exercise 2.1; region.group, group.size, group.rank
    Tensor.chunk(n, dim)   n parts along dim, as views; Tensor.clone(memory_format=torch.contiguous_format)
    apply_rotary(x, rotary)   the rotated x, (b, s, heads, d)
    self.attend(query, key, value)   attention of (b, heads, s, d) over (b, kv_heads, s, d), like query; repeats heads
    nn.Parameter(tensor), F.linear, F.silu, Tensor.unflatten(-1, (-1, d)), Tensor.flatten(2), Tensor.transpose(1, 2)

Check it with: python -m exercises check tensor_parallel_block

Stub a207a8e9.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.models.layers import Attention, Rotary, apply_rotary
from minidist.parallel.tensor.simple import TensorParallelRegion


def shard(module: nn.Module, dim: int, group: Group, num_shards: int | None = None) -> nn.Module:
    """Replace `module.weight` by this rank's shard along `dim`; consecutive ranks share one if there are fewer."""
    raise NotImplementedError("shard the weight along `dim`; consecutive ranks share a shard if num_shards < n")


class TensorParallelMLP(nn.Module):
    """The feed-forward layer `mlp`, `down_proj(silu(gate_proj(x)) * up_proj(x))`, with its inner features sharded."""

    def __init__(self, mlp: nn.Module, region: TensorParallelRegion):
        super().__init__()
        raise NotImplementedError("shard the three matrices")

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("return the layer's output, (b, s, h), with one collective each way")


class TensorParallelAttention(nn.Module):
    """The layer `attention`; each rank has consecutive query heads, and the key and value heads that they attend to."""

    attend = Attention.attend  # context parallelism replaces it

    def __init__(self, attention: nn.Module, region: TensorParallelRegion):
        super().__init__()
        raise NotImplementedError("shard the four matrices by heads")

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        raise NotImplementedError("return attention's output, (b, s, h), with one collective each way")
