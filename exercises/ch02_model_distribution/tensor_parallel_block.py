"""A tensor-parallel layer: feed-forward and attention.

A layer of a Transformer is too large for one rank. Write both of its halves with the matrices sharded over the n ranks
of a region, so that each half needs one all-reduce in forward and one in backward.

shard_weight: cuts module.weight along `dim` into num_shards equal parts, and gives the module this rank's part as a new
parameter: contiguous, no view of the full one, and frozen if that is. The full one does not change: a tied module may
still use it. sum_replica_gradients: from now on, every backward adds to .grad of these parameters the sum of the
gradients that the ranks of `group` compute in it. Frozen parameters are left alone.
mlp: a module with gate_proj, up_proj (f, h) and down_proj (h, f). attention: one with q_proj (heads d, h), k_proj and
v_proj (kv_heads d, h), o_proj (h, heads d) and head_dim d. n divides f, heads and either kv_heads or, if there are
fewer of them, kv_heads divides n. `hidden` and the result are (b, s, h); rotary is for apply_rotary (positions).
Example: 8 query heads and 2 key and value heads of d = 4 features on 4 ranks.
    Rank 1 holds rows 8 to 15 of q_proj (query heads 2 and 3), columns 8 to 15 of o_proj, and rows 0 to 3 of k_proj and
    v_proj: key and value head 0, which rank 0 holds as well, so that heads_group has the ranks 0 and 1. If key head 0
    gets the gradient 1 from the query heads of rank 0 and 2 from those of rank 1, both ranks end with 3.
    With f = 12 rank 1 holds rows 3 to 5 of gate_proj. shard_weight(nn.Linear(5, 12), 0, group).weight is (3, 5).

Checked: output, shards and gradients on 1 to 4 ranks against one process in float64, for one key head per rank, several
and fewer; the gradient of a key head that several ranks hold, also after a second backward; the collectives and their
shapes; that a shard is contiguous and no view of the full matrix, in the module that shard_weight was given; that the
full matrix does not change; frozen parameters; that attention calls `attend` with this rank's heads; a region with the
sequence sharded; and the feed-forward layer for any number of tokens on 1 to 7 ranks.

You may call:
    region.enter(x), region.leave(x)   the two ends of the region: exercise 2.1; region.group, group.size, group.rank
    sum_over_ranks(x, group)   the sum of the ranks' x, a new tensor: exercise 2.1
    Tensor.register_hook(function)   in backward, function(gradient) takes the place of the gradient
    Tensor.chunk(n, dim)   n parts along dim, as views; Tensor.clone(memory_format=torch.contiguous_format)
    apply_rotary(x, rotary)   the rotated x, (b, s, heads, d)
    self.attend(query, key, value)   attention of (b, heads, s, d) over (b, kv_heads, s, d), like query; repeats heads
    nn.Parameter(tensor), F.silu, Tensor.unflatten(-1, (-1, d)), Tensor.flatten(2), Tensor.transpose(1, 2)

Check it with: python -m exercises check tensor_parallel_block

Stub 9b134366.
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
    raise NotImplementedError("shard the weight along `dim`; consecutive ranks share a shard if num_shards < n")


def sum_replica_gradients(group: Group, *parameters: nn.Parameter) -> None:
    """Sum the gradients of some parameters over the ranks of `group`, inside backward.

    For replicas that work on different heads or tokens: each rank's gradient is a partial sum. Frozen ones have none.
    """
    raise NotImplementedError("let every backward sum the gradients over the ranks of `group`")


class TensorParallelMLP(nn.Module):
    """The feed-forward layer `down_proj(silu(gate_proj(x)) * up_proj(x))`; each rank has 1/n of the inner features."""

    def __init__(self, mlp: nn.Module, region: Region):
        super().__init__()
        raise NotImplementedError("keep the region, and shard the three matrices")

    def forward(self, hidden: Tensor) -> Tensor:
        """Collective: apply the layer: (b, s, h) -> (b, s, h); both are (b, s / n, h) with sequence parallelism."""
        raise NotImplementedError("return the layer's output, (b, s, h), with one collective each way")


class TensorParallelAttention(nn.Module):
    """Attention; each rank has consecutive query heads, and the key and value heads to which they belong.

    With fewer key-value heads than ranks, several ranks hold a replica of the same head. heads_group: these ranks, None
    if this rank is the only one.
    """

    attend = Attention.attend  # context parallelism replaces it

    def __init__(self, attention: nn.Module, region: Region, heads_group: Group | None):
        super().__init__()
        raise NotImplementedError("shard the four matrices by heads; sum the gradients of shared heads")

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Collective: apply the layer; shapes as in `TensorParallelMLP.forward`. rotary: always for all s tokens."""
        raise NotImplementedError("return attention's output, (b, s, h), with one collective each way")
