"""Tensor parallelism in one file: fp32 or fp64, no pipeline or compilation, no dropout under sequence parallelism.

Layers are sharded as in Shoeybi et al. 2019 (arXiv 1909.08053, section 3): one sum over the ranks in forward and one in
backward. Sequence parallelism is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2).
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.labels import IGNORE_INDEX
from minidist.models.layers import Attention, Rotary, apply_rotary
from minidist.parallel.tensor.split import ParamShard
from minidist.parameters import Box, named_parameters
from minidist.validation import validate_tensor_parallel


class Operator(torch.autograd.Function):
    """`Operator.apply(x, forward, backward)` returns `forward(x)`, and applies `backward` to the gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.apply_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.apply_backward(grad), None, None


class TensorParallelRegion(NamedTuple):
    """Where activations `enter` and `leave` a region of n ranks; outside of it each rank has all tokens, (b, s, h)."""

    group: Group

    def gather(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def reduce(self, x: Tensor) -> Tensor:
        return ops.all_reduce(x, self.group.key)

    def enter(self, x: Tensor) -> Tensor:
        return Operator.apply(x, self.gather, self.reduce)

    def leave(self, x: Tensor) -> Tensor:
        """Collective: return the output of a region, the sum of the ranks' partial results `x`."""
        return Operator.apply(x, self.reduce, self.gather)


class SequenceParallelRegion(TensorParallelRegion):
    """A region outside of which each rank has its own tokens, (b, s / n, h): `gather` and `reduce` are collectives."""

    def gather(self, x: Tensor) -> Tensor:
        return ops.all_gather(x.movedim(1, 0), self.group.key, self.group.size).movedim(0, 1)

    def reduce(self, x: Tensor) -> Tensor:
        return ops.reduce_scatter(x.movedim(1, 0), self.group.key, self.group.size).movedim(0, 1)


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


class VocabParallelEmbedding(nn.Module):
    """The layer `embedding`, (b, s) int64 -> (b, s, h); each rank has the rows of V / n tokens of the vocabulary."""

    def __init__(self, embedding: nn.Module, region: TensorParallelRegion):
        super().__init__()
        self.region, self.weight = region, shard(embedding, 0, region.group).weight

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.region.group.rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        return self.region.leave(F.embedding(local.where(is_here, 0), self.weight) * is_here[..., None])


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum and number of the tokens' losses; logits (b, s, V / n), labels (b, s) int64."""
    local, is_counted = labels - group.rank * logits.shape[-1], labels != IGNORE_INDEX
    is_here = (local >= 0) & (local < logits.shape[-1])
    shifted = logits - ops.all_reduce_max(logits.detach().amax(-1), group.key)[..., None]  # so that no exp overflows
    at_label = shifted.gather(-1, local.where(is_here, 0)[..., None])[..., 0] * is_here
    normalizer, at_label = TensorParallelRegion(group).leave(torch.stack((shifted.exp().sum(-1), at_label)))
    return ((normalizer.log() - at_label) * is_counted).sum(), is_counted.sum()


def apply_tensor_parallel(model: nn.Module, group: Group, sequence_parallel: bool = False) -> dict[str, ParamShard]:
    """Shard `model`, a full Transformer, in place; return this rank's shard of each parameter, by global name."""
    validate_tensor_parallel(model.config, group.size)
    full = {name: p.shape for name, p in named_parameters(model).items()}
    region = (SequenceParallelRegion if sequence_parallel else TensorParallelRegion)(group)
    for layer in model.model.layers:
        layer.self_attn = TensorParallelAttention(layer.self_attn, region)
        layer.mlp = TensorParallelMLP(layer.mlp, region)
    model.model.embed_tokens = VocabParallelEmbedding(model.model.embed_tokens, region)
    shard(model.lm_head, 0, group).register_forward_pre_hook(lambda _, args: (region.enter(*args),))
    model.loss = partial(vocab_parallel_loss, group=group)
    model.tie_weights()
    own = {name: p.shape for name, p in named_parameters(model).items()}
    return {name: describe_shard(name, full[name], own[name], group, sequence_parallel) for name in own}


def describe_shard(name: str, full: torch.Size, own: torch.Size, group: Group, sequence_parallel: bool) -> ParamShard:
    """Return which shard of a parameter of shape `full` this rank holds, from the shape `own` of its shard."""
    index = group.rank * (num_shards := full.numel() // own.numel()) // group.size
    holders = tuple(rank for rank in range(group.size) if rank * num_shards // group.size == index)
    start = tuple(index * a if a < b else 0 for a, b in zip(own, full, strict=True))
    # Replicas of a key or value head serve different query heads; those of a norm see different tokens, if sharded.
    is_partial = len(holders) > 1 and (".self_attn." in name or sequence_parallel and "norm." in name)
    return ParamShard(Box(start, tuple(map(sum, zip(start, own, strict=True)))), holders, is_partial)
