"""Tensor parallelism: the ranks of a group share every layer, each with a shard of its weight matrices.

A column-parallel layer has some of the output features, a row-parallel layer some of the input features. One after the
other, as in the MLP and in attention, they need one sum over the ranks in forward and one in backward (Shoeybi et al.
2019, arXiv 1909.08053, section 3). Sequence parallelism splits each sum into a reduce-scatter and an all-gather, so
that norms and residuals between the layers see 1/n of the tokens (Korthikanti et al. 2022, arXiv 2205.05198, section
4.2.2).

Shapes: b samples, s tokens, h features, n ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from minidist.comm import Group, all_gather, all_reduce, reduce_scatter
from minidist.data.loader import IGNORE_INDEX
from minidist.models.layers import Attention, Rotary, apply_rotary, at_least_float32

# -- region operators -------------------------------------------------------------------------------------------------


def sum_over_ranks(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Collective: return the sum (or the reduction `op`) of the ranks' `x`; `x` itself is not changed."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(total, group, op)
    return total


class RegionOperator(Function):
    """`RegionOperator.apply(x, forward, backward)` returns `forward(x)`, and applies `backward` to the gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.apply_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.apply_backward(grad), None, None


class Region:
    """Where activations enter and leave the tensor-parallel layers; outside of it each rank has all tokens, (b, s, h).

    `gather` and `reduce` are each other's backward. Ranks that compute different things from one input have partial
    gradients of it, to be summed; a sum passes its gradient to every summand.
    """

    def __init__(self, group: Group):
        self.group = group

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens, which every rank has here: the identity."""
        return x.view_as(x)

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results `x`, (b, s, h)."""
        return sum_over_ranks(x, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a layer, `gather(x)`; backward returns `reduce` of its gradient. Collective."""
        return RegionOperator.apply(x, self.gather, self.reduce)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' results, `reduce(x)`; backward returns `gather` of its gradient. Collective."""
        return RegionOperator.apply(x, self.reduce, self.gather)


class SequenceParallelRegion(Region):
    """A region outside of which each rank has its own tokens, (b, s / n, h): the sum is reduce-scattered over them."""

    def gather(self, x: Tensor) -> Tensor:
        """Collective: give every rank all tokens, (b, s / n, h) -> (b, s, h)."""
        own = x.movedim(1, 0).contiguous()
        full = own.new_empty(self.group.size * len(own), *own.shape[1:])
        all_gather(full, own, self.group)
        # Contiguous once here: each projection that reads it would otherwise copy it, and keep the copy for backward.
        return full.movedim(0, 1).contiguous()

    def reduce(self, x: Tensor) -> Tensor:
        """Collective: sum the ranks' partial results of this rank's tokens, (b, s, h) -> (b, s / n, h)."""
        full = x.movedim(1, 0).contiguous()
        own = full.new_empty(len(full) // self.group.size, *full.shape[1:])
        reduce_scatter(own, full, self.group)
        return own.movedim(0, 1)


def gather_features(x: Tensor, group: Group) -> Tensor:
    """Collective: concatenate the features `x` (..., m) of all ranks, such as logits: (..., n * m).

    All ranks must compute the same from the result: each then has its full gradient, and takes its slice of it.
    """

    def gather(x: Tensor) -> Tensor:
        parts = x.new_empty(group.size, *x.shape)
        all_gather(parts, x.contiguous()[None], group)
        return torch.cat(parts.unbind(), -1)

    return RegionOperator.apply(x, gather, lambda grad: grad.chunk(group.size, -1)[group.rank].contiguous())


# -- layers -----------------------------------------------------------------------------------------------------------


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


class VocabParallelEmbedding(nn.Module):
    """The embedding; each rank has the rows of 1/n of the vocabulary: (b, s) int64 -> (b, s, h)."""

    def __init__(self, embedding: nn.Module, region: Region):
        super().__init__()
        self.region = region
        self.weight = shard_weight(embedding, 0, region.group).weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: look up the tokens; each rank contributes the rows that it has, and zeros."""
        local = tokens - self.region.group.rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(is_here, 0), self.weight)
        return self.region.leave(rows * is_here[..., None])


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum of the tokens' cross-entropies, in nats, and their number, equal on all ranks.

    logits: (b, s, vocab / n). labels: (b, s) int64; IGNORE_INDEX is left out. No rank needs all logits: the ranks
    exchange three numbers per token: the largest logit, the sum of the exponentials, the logit of the label.
    """
    logits = logits.to(at_least_float32(logits.dtype))
    # The largest logit cancels in the loss, so it has no gradient; without it an exponential could overflow.
    shifted = logits - sum_over_ranks(logits.amax(-1), group, "max")[..., None]
    local = labels - group.rank * logits.shape[-1]
    is_here = (local >= 0) & (local < logits.shape[-1])
    at_label = shifted.gather(-1, local.where(is_here, 0)[..., None])[..., 0] * is_here
    normalizer, at_label = Region(group).leave(torch.stack((shifted.exp().sum(-1), at_label)))
    is_counted = labels != IGNORE_INDEX
    return ((normalizer.log() - at_label) * is_counted).sum(), is_counted.sum()


# -- the model --------------------------------------------------------------------------------------------------------


def apply_tensor_parallel(
    model: nn.Module, group: Group, heads_group: Group | None = None, sequence_parallel: bool = False
) -> None:
    """Shard a Transformer over the ranks of `group`, in place; parameters keep their names.

    heads_group: the ranks that hold a replica of this rank's key-value heads, None if there is no other. A module that
    another pipeline stage holds (`nn.Identity`) is left alone.
    """
    region = SequenceParallelRegion(group) if sequence_parallel else Region(group)
    decoder, norms = model.model, []
    for layer in decoder.layers:
        if not isinstance(layer, nn.Identity):
            layer.self_attn = TensorParallelAttention(layer.self_attn, region, heads_group)
            layer.mlp = TensorParallelMLP(layer.mlp, region)
            norms += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    if not isinstance(decoder.embed_tokens, nn.Identity):
        decoder.embed_tokens = VocabParallelEmbedding(decoder.embed_tokens, region)
    if not isinstance(model.lm_head, nn.Identity):
        shard_weight(model.lm_head, 0, group).register_forward_pre_hook(lambda _, args: (region.enter(*args),))
        model.loss = partial(vocab_parallel_loss, group=group)
        norms.append(decoder.norm.weight)
        model.tie_weights()
    if sequence_parallel:  # a norm outside of the regions sees this rank's tokens only
        sum_replica_gradients(group, *norms)
