"""What a rank has in memory before an update: parameters, gradients, and what the optimizer keeps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from minidist import process_groups as roles
from minidist.config import OptimConfig, ZeroConfig
from minidist.models.config import ModelConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.shapes import Dimensions

# The parameters of a layer in the model's order, each with what a rank holds of it and with who else of the tp axis has
# a part of its gradient: "alone" nobody, as each holds another part or computes the same; "tokens" those that share the
# sequence; "head" those that hold the same key and value head, for queries of their own.
LAYER = (
    ("input_layernorm.weight", "h", "tokens"),
    ("self_attn.q_proj.weight", "heads/tp d h", "alone"),
    ("self_attn.k_proj.weight", "kv/tp d h", "head"),
    ("self_attn.v_proj.weight", "kv/tp d h", "head"),
    ("self_attn.o_proj.weight", "h heads/tp d", "alone"),
    ("post_attention_layernorm.weight", "h", "tokens"),
    ("mlp.gate_proj.weight", "f/tp h", "alone"),
    ("mlp.up_proj.weight", "f/tp h", "alone"),
    ("mlp.down_proj.weight", "h f/tp", "alone"),
)
FIRST = (("model.embed_tokens.weight", "vocab/tp h", "alone"),)
LAST = (("model.norm.weight", "h", "tokens"), ("lm_head.weight", "vocab/tp h", "alone"))


@dataclass(frozen=True)
class Weight:
    """A parameter as one rank holds it. numel: elements here; shared: see LAYER; stages: that hold it."""

    name: str
    numel: int
    dimensions: int
    shared: str
    stages: tuple[int, ...]


def weights(layout: Layout, stage: int) -> list[Weight]:
    """The parameters on a stage, in the order of the model; every tensor rank of it holds as many elements."""
    tied, sizes = layout.config.model.tie_embeddings, Dimensions.of(layout)
    parts = layout.chunks(stage)
    rows = list(FIRST) if any(part.first or (part.last and tied) for part in parts) else []
    for index in sorted(index for part in parts for index in part.layers):
        rows += [(f"model.layers.{index}.{name}", shape, shared) for name, shape, shared in LAYER]
    if any(part.last for part in parts):
        rows += LAST[: 1 if tied else 2]
    return [
        Weight(name, sizes.numel(shape), 1 if shape == "h" else 2, shared, _stages(layout, stage, name, tied))
        for name, shape, shared in rows
    ]


def _stages(layout: Layout, stage: int, name: str, tied: bool) -> tuple[int, ...]:
    return (
        roles.first_and_last_stages(layout.schedule) if tied and name == FIRST[0][0] and layout.schedule else (stage,)
    )


def parameter_tensors(model: ModelConfig) -> int:
    """How many parameters the whole model has, a tied one counted once."""
    return len(FIRST) + model.num_layers * len(LAYER) + len(LAST[: 1 if model.tie_embeddings else 2])


class Row(NamedTuple):
    """Parameters that are sharded together. numel: elements, padding included; shard: those of one rank, all of them
    where nothing is sharded; moments: numbers that the optimizer keeps for each element."""

    numel: int
    shard: int
    moments: int


@dataclass(frozen=True)
class ModelStates:
    """Bytes of one rank. masters: 0 where the parameters themselves are updated."""

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments


def row_of(numel: int, shards: int, moments: int) -> Row:
    """So many elements, padded to as many equal shards."""
    shard = -(-numel // shards)
    return Row(shard * shards, shard, moments)


def moments_of(optim: OptimConfig, *, hidden_matrix: bool) -> int:
    """Numbers kept per element of a parameter. hidden_matrix: whether it is a matrix of a layer, which is Muon's."""
    if optim.kind == "sgd":
        return 1 if optim.momentum else 0
    return 1 if optim.kind == "muon" and hidden_matrix else 2


def model_states(rows: Iterable[Row], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """What the rows take on each rank: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1.

    In bytes per element, with N shards: stage 0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2
    `p + (a + m + s)/N`, or as stage 1 with gradients kept whole; stage 3 `(p + a + m + s)/N`. p, a, m, s are those of
    parameter, accumulated gradient, master and all moments: with fp16 throughout and AdamW 2, 2, 4 and 8, sixteen.
    """
    rows = list(rows)
    whole, part = sum(row.numel for row in rows), sum(row.shard for row in rows)
    return ModelStates(
        parameters=(part if zero.stage == 3 else whole) * PRECISION_BYTES[policy.parameter],
        gradients=(part if zero.shares_gradients else whole) * PRECISION_BYTES[policy.accumulate],
        masters=part * PRECISION_BYTES[policy.master] if policy.separate_masters else 0,
        moments=sum(row.shard * row.moments for row in rows) * PRECISION_BYTES[policy.state],
    )
