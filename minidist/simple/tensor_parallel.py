"""Tensor parallelism: the ranks of a group share every layer, each with a shard of its weight matrices.

A column-parallel layer has some of the output features, a row-parallel layer some of the input features. One after the
other, as in the MLP and in attention, they need one sum over the ranks in forward and one in backward (Shoeybi et al.
2019, arXiv 1909.08053, section 3). Sequence parallelism splits each sum into a reduce-scatter and an all-gather, so
that norms and residuals between the layers see 1/n of the tokens (Korthikanti et al. 2022, arXiv 2205.05198, section
4.2.2).

Shapes: b samples, s tokens, h features, n ranks.
"""

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


def gather_along(x: Tensor, dim: int, group: Group) -> Tensor:
    """Collective: return the ranks' `x`, concatenated along `dim` in rank order."""
    own = x.detach().movedim(dim, 0).contiguous()
    full = own.new_empty(group.size * own.shape[0], *own.shape[1:])
    all_gather(full, own, group)
    return full.movedim(0, dim)


def reduce_scatter_along(x: Tensor, dim: int, group: Group) -> Tensor:
    """Collective: return this rank's of n equal slices, along `dim`, of the sum of the ranks' `x`."""
    full = x.detach().movedim(dim, 0).contiguous()
    own = full.new_empty(full.shape[0] // group.size, *full.shape[1:])
    reduce_scatter(own, full, group)
    return own.movedim(0, dim)


class CopyToRegion(Function):
    """Identity in forward, sum of the gradients in backward: each rank goes on to compute something else with `x`."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_over_ranks(grad, ctx.group), None


class ReduceFromRegion(Function):
    """Sum in forward, identity in backward: the ranks have partial results, and all of them get their sum."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherSequence(Function):
    """All-gather in forward, reduce-scatter in backward: `CopyToRegion` for tokens that are sharded, (b, s / n, h)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_along(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_along(grad, 1, ctx.group), None


class ReduceScatterSequence(Function):
    """Reduce-scatter in forward, all-gather in backward: `ReduceFromRegion` for sharded tokens, to (b, s / n, h)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_along(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_along(grad, 1, ctx.group), None


class GatherFeatures(Function):
    """All-gather in forward, slice in backward: all ranks then compute the same from the full result, (..., n * f).

    Their gradients are equal, so each keeps its slice of its own: a sum would count the same gradient n times.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_along(x, -1, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size, -1)[ctx.group.rank], None


class Region:
    """How activations enter and leave the tensor-parallel layers: (b, s, h) on every rank outside of them."""

    def __init__(self, group: Group, sequence_parallel: bool = False):
        self.group, self.sequence_parallel = group, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """Collective in forward or backward: give every rank all tokens; `x` is (b, s / n, h) if sequence-parallel."""
        return (GatherSequence if self.sequence_parallel else CopyToRegion).apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Collective in forward or backward: sum the ranks' partial results `x`, (b, s, h)."""
        return (ReduceScatterSequence if self.sequence_parallel else ReduceFromRegion).apply(x, self.group)


# -- layers -----------------------------------------------------------------------------------------------------------


def take_shard(weight: Tensor, dim: int, index: int, num_shards: int) -> nn.Parameter:
    """Return shard `index` of `num_shards` equal ones of `weight`, cut along `dim`, as a parameter of its own."""
    return nn.Parameter(weight.detach().chunk(num_shards, dim)[index].clone(memory_format=torch.contiguous_format))


def sum_replica_gradients(parameter: nn.Parameter, group: Group) -> None:
    """Sum the gradient of a parameter over the ranks of `group`, inside backward.

    For replicas that work on different heads or tokens: each rank's own gradient is a partial sum.
    """
    parameter.register_hook(lambda gradient: sum_over_ranks(gradient, group))


class TensorParallelMLP(nn.Module):
    """The feed-forward layer `down(silu(gate(x)) * up(x))`; each rank has 1/n of the inner features."""

    def __init__(self, mlp: nn.Module, region: Region):
        super().__init__()
        self.region = region
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        for linear, dim in ((self.gate_proj, 0), (self.up_proj, 0), (self.down_proj, 1)):
            linear.weight = take_shard(linear.weight, dim, region.group.rank, region.group.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Collective: apply the layer."""
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
        rank, size = region.group.rank, region.group.size
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        kv_shards = min(size, self.k_proj.weight.shape[0] // self.head_dim)  # no head is split
        self.q_proj.weight = take_shard(self.q_proj.weight, 0, rank, size)
        self.o_proj.weight = take_shard(self.o_proj.weight, 1, rank, size)
        self.k_proj.weight = take_shard(self.k_proj.weight, 0, rank * kv_shards // size, kv_shards)
        self.v_proj.weight = take_shard(self.v_proj.weight, 0, rank * kv_shards // size, kv_shards)
        if heads_group is not None:  # each replica sees the query heads of its rank
            sum_replica_gradients(self.k_proj.weight, heads_group)
            sum_replica_gradients(self.v_proj.weight, heads_group)

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Collective: apply the layer. rotary: for all tokens, also if they are sharded outside of the layer."""
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
        self.weight = take_shard(embedding.weight, 0, region.group.rank, region.group.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: look up the tokens; each rank contributes the rows that it has, and zeros."""
        local = tokens - self.region.group.rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(is_here, 0), self.weight)
        return self.region.leave(rows * is_here[..., None])


class VocabParallelHead(nn.Module):
    """The output head; each rank computes the logits of 1/n of the vocabulary: (b, s, h) -> (b, s, vocab / n)."""

    def __init__(self, head: nn.Module, region: Region):
        super().__init__()
        self.region = region
        self.weight = take_shard(head.weight, 0, region.group.rank, region.group.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Collective in forward or backward: compute this rank's logits, of all tokens."""
        return F.linear(self.region.enter(hidden), self.weight)


# -- loss -------------------------------------------------------------------------------------------------------------


class VocabParallelLoss:
    """The sum of the tokens' cross-entropies from sharded logits: no rank has the logits of the whole vocabulary.

    The ranks exchange three numbers per token: the largest logit, the sum of the exponentials, the logit of the label.
    """

    def __init__(self, group: Group):
        self.group = group

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: return the sum in nats and the number of tokens in it, equal on all ranks.

        logits: (b, s, vocab / n). labels: (b, s) int64; IGNORE_INDEX is left out.
        """
        logits = logits.to(at_least_float32(logits.dtype))
        # The largest logit cancels in the loss, so it has no gradient; without it an exponential could overflow.
        shifted = logits - sum_over_ranks(logits.amax(-1), self.group, "max")[..., None]
        local = labels - self.group.rank * logits.shape[-1]
        is_here = (local >= 0) & (local < logits.shape[-1])
        at_label = shifted.gather(-1, local.where(is_here, 0)[..., None])[..., 0] * is_here
        sums = torch.stack((shifted.exp().sum(-1), at_label))
        normalizer, at_label = ReduceFromRegion.apply(sums, self.group)
        is_counted = labels != IGNORE_INDEX
        return ((normalizer.log() - at_label) * is_counted).sum(), is_counted.sum()


class GatheredLoss:
    """The same loss from gathered logits: each rank has them all, and computes the whole loss. The naive version."""

    def __init__(self, loss, group: Group):
        self.loss, self.group = loss, group

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: as `VocabParallelLoss`; n times its memory, and vocab / 3 times its bytes."""
        return self.loss(GatherFeatures.apply(logits, self.group), labels)


# -- the model --------------------------------------------------------------------------------------------------------


def apply_tensor_parallel(
    model: nn.Module, group: Group, heads_group: Group | None = None, sequence_parallel: bool = False
) -> None:
    """Shard a Transformer over the ranks of `group`, in place; parameters keep their names.

    heads_group: the ranks that hold a replica of this rank's key-value heads, None if there is no other. A module that
    another pipeline stage holds (`nn.Identity`) is left alone.
    """
    region = Region(group, sequence_parallel)
    decoder = model.model
    for layer in decoder.layers:
        if isinstance(layer, nn.Identity):
            continue
        layer.self_attn = TensorParallelAttention(layer.self_attn, region, heads_group)
        layer.mlp = TensorParallelMLP(layer.mlp, region)
        if sequence_parallel:
            # A norm outside of the regions sees this rank's tokens only.
            sum_replica_gradients(layer.input_layernorm.weight, group)
            sum_replica_gradients(layer.post_attention_layernorm.weight, group)
    if not isinstance(decoder.embed_tokens, nn.Identity):
        decoder.embed_tokens = VocabParallelEmbedding(decoder.embed_tokens, region)
    if not isinstance(model.lm_head, nn.Identity):
        model.lm_head = VocabParallelHead(model.lm_head, region)
        model.loss = VocabParallelLoss(group)
        if sequence_parallel:
            sum_replica_gradients(decoder.norm.weight, group)
    model.tie_weights()
