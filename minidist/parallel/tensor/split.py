"""Tensor parallelism: replace the layers of a full model by this rank's shards, in place.

The model code knows nothing of parallelism and is not imported here: projections are found by their names, Llama's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minidist.comm import Group
from minidist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.tensor.operators import Operator, region_operators
from minidist.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelLoss
from minidist.parameters import Box, named_parameters
from minidist.validation import validate_tensor_parallel


@dataclass(frozen=True)
class ParamShard:
    """The shard of a parameter that one rank of the group holds.

    box: the index range of the shard in each dimension of the full parameter. holders: the group ranks that hold this
    same shard, this rank included. partial: whether the shard's gradient is the sum of the holders' local gradients;
    otherwise every holder computes the full gradient.
    """

    box: Box
    holders: tuple[int, ...]
    partial: bool = False


def apply_tensor_parallel(model: nn.Module, group: Group, sequence_parallel: bool = False) -> dict[str, ParamShard]:
    """Shard `model` in place over the ranks of `group`; return this rank's shards, by global parameter name.

    model: a Transformer, or a pipeline stage's part of one. All ranks must pass equal models, and feed them the same
    batches. Afterwards every rank computes the loss of the full model, and without labels the model returns this
    rank's columns of the logits, (b, s, vocab / ranks). Norms are replicated. Raises ValueError if the group size does
    not divide the model's sizes (`validate_tensor_parallel`).

    sequence_parallel: use sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between
    tensor-parallel regions each rank has an equal part of the sequence. The number of bytes sent is the same, and the
    activations that norms, dropout and the residual stream save for backward are sharded. A norm then processes a part
    of the tokens, so its gradients are partial.
    """
    config = model.config
    size = group.size
    validate_tensor_parallel(config, size)
    everyone = tuple(range(size))
    held = {name: ParamShard(Box.whole(tuple(p.shape)), everyone) for name, p in named_parameters(model).items()}
    if size == 1:
        return held
    enter, leave = region_operators(group, sequence_parallel)
    sharder = _WeightSharder(group, held)
    for index, layer in enumerate(model.model.layers):
        if f"model.layers.{index}.self_attn.q_proj.weight" not in held:
            continue  # another stage of the pipeline holds it
        for module in (layer.self_attn, layer.mlp):
            _register_enter_hook(module, enter)
        _shard_attention(layer.self_attn, leave, config, sharder, f"model.layers.{index}.self_attn")
        _shard_feed_forward(layer.mlp, leave, sharder, f"model.layers.{index}.mlp")
    first, _ = sharder.shard_range(config.vocab_size)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    rows = None
    if embedding in held:
        rows = sharder.shard(embedding, model.model.embed_tokens.weight, 0)
        model.model.embed_tokens = VocabParallelEmbedding(rows, first, leave)
    if model.model.norm.weight is not None:  # the end of the model is here
        # A tied head has no name of its own in `held`: `tie_weights` gives it the embedding's parameter.
        model.lm_head = ColumnParallelLinear(
            sharder.shard(head, model.lm_head.weight, 0) if head in held else rows, enter
        )
        model.loss = VocabParallelLoss(first, group)
    model.tie_weights()
    if sequence_parallel:
        for name in [name for name in held if name.endswith("norm.weight")]:
            held[name] = replace(held[name], partial=True)
        model.model.register_forward_pre_hook(_make_positions_hook(group), with_kwargs=True)
    return held


class _WeightSharder:
    """Takes this rank's shards of weights and records them in `held`, by parameter name."""

    def __init__(self, group: Group, held: dict[str, ParamShard]):
        self.group = group
        self._held = held

    def shard_range(self, whole: int) -> tuple[int, int]:
        """Return the (start, stop) of this rank's shard if `whole` features are sharded equally."""
        each = whole // self.group.size
        return self.group.rank * each, (self.group.rank + 1) * each

    def shard(self, name: str, weight: Tensor, dim: int, at: tuple[int, int] | None = None, holders=None) -> Tensor:
        """Return a copy of this rank's rows (dim 0) or columns (dim 1), so that the full weight can be freed.

        at: (start, stop), an equal shard by default; holders: ranks with the same shard, this rank alone by default.
        """
        begin, end = at or self.shard_range(weight.shape[dim])
        start, stop = [0] * weight.ndim, list(weight.shape)
        start[dim], stop[dim] = begin, end
        holders = holders or (self.group.rank,)
        self._held[name] = ParamShard(Box(tuple(start), tuple(stop)), holders, partial=len(holders) > 1)
        with torch.no_grad():
            return weight.narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)


def _shard_attention(attention: nn.Module, leave: Operator, config, sharder: _WeightSharder, name: str) -> None:
    """Shard attention by heads: consecutive query heads, with the key and value heads that they attend to.

    leave: the operator that sums the ranks' outputs. name: the module's name in the full model.
    """
    group = sharder.group
    width = config.head_dim
    attention.q_proj = ColumnParallelLinear(sharder.shard(f"{name}.q_proj.weight", attention.q_proj.weight, 0))
    # With fewer key heads than ranks, several ranks hold the same head, each for its own query heads.
    each = max(1, config.num_kv_heads // group.size)
    head = group.rank * config.num_kv_heads // group.size
    holders = tuple(r for r in range(group.size) if r * config.num_kv_heads // group.size == head)
    for which in ("k_proj", "v_proj"):
        weight = getattr(attention, which).weight
        at = (head * width, (head + each) * width)
        rows = sharder.shard(f"{name}.{which}.weight", weight, 0, at, holders)
        setattr(attention, which, ColumnParallelLinear(rows))
    attention.o_proj = RowParallelLinear(sharder.shard(f"{name}.o_proj.weight", attention.o_proj.weight, 1), leave)


def _shard_feed_forward(layer: nn.Module, leave: Operator, sharder: _WeightSharder, name: str) -> None:
    """Shard the feed-forward layer by its inner features.

    leave: the operator that sums the ranks' outputs. name: the module's name in the full model.
    """
    for which in ("gate_proj", "up_proj"):
        rows = sharder.shard(f"{name}.{which}.weight", getattr(layer, which).weight, 0)
        setattr(layer, which, ColumnParallelLinear(rows))
    layer.down_proj = RowParallelLinear(sharder.shard(f"{name}.down_proj.weight", layer.down_proj.weight, 1), leave)


def _register_enter_hook(module: nn.Module, enter: Operator) -> None:
    """Apply `enter` once for all the projections that read the module's first argument."""
    module.register_forward_pre_hook(lambda _, args: (enter(args[0]), *args[1:]))


def _make_positions_hook(group: Group):
    """Return a hook that narrows the dropout address to this rank's positions of the sequence."""

    def narrow(_, args, kwargs):
        address = kwargs.get("address")
        if address is None:
            return args, kwargs
        each = len(address.positions) // group.size
        own = address.positions[group.rank * each : (group.rank + 1) * each]
        return args, {**kwargs, "address": replace(address, positions=own)}

    return narrow
