"""The model states of a rank before an update: parameters, gradients, master weights and optimizer states."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from minidist.config import ConsistencyConfig, OptimConfig, ZeroConfig
from minidist.models.config import ModelConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
from minidist.process_groups import first_and_last_stages
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.shapes import Dimensions

# Over which tensor-parallel ranks a parameter's gradient is summed. "none": this rank alone, as the parameter is
# sharded, or replicated with the same input everywhere; "sequence_parallel": all ranks, if sequence parallelism gives
# each other tokens; "kv_head_replicas": the ranks that replicate the same key-value head, each for its query heads.
TPSumRule = Literal["none", "sequence_parallel", "kv_head_replicas"]

# The parameters of a layer in the model's order: name, local shape, and TPSumRule.
LAYER_PARAMETERS = (
    ("input_layernorm.weight", "h", "sequence_parallel"),
    ("self_attn.q_proj.weight", "heads/tp d h", "none"),
    ("self_attn.k_proj.weight", "kv/tp d h", "kv_head_replicas"),
    ("self_attn.v_proj.weight", "kv/tp d h", "kv_head_replicas"),
    ("self_attn.o_proj.weight", "h heads/tp d", "none"),
    ("post_attention_layernorm.weight", "h", "sequence_parallel"),
    ("mlp.gate_proj.weight", "f/tp h", "none"),
    ("mlp.up_proj.weight", "f/tp h", "none"),
    ("mlp.down_proj.weight", "h f/tp", "none"),
)
EMBEDDING_PARAMETERS = (("model.embed_tokens.weight", "vocab/tp h", "none"),)
HEAD_PARAMETERS = (("model.norm.weight", "h", "sequence_parallel"), ("lm_head.weight", "vocab/tp h", "none"))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter with its size on one tensor-parallel rank of a pipeline stage, before ZeRO shards it.

    numel: elements of the local shard. dimensions: 1 for a vector, 2 for a matrix. tp_sum_rule: over which
    tensor-parallel ranks its gradient is summed (`TPSumRule`). stages: the pipeline stages that have the parameter.
    """

    name: str
    numel: int
    dimensions: int
    tp_sum_rule: TPSumRule
    stages: tuple[int, ...]


def local_parameters(layout: RunLayout, stage: int) -> list[LocalParameter]:
    """Return the parameters of a pipeline stage, in the model's order, with their sizes on a tensor-parallel rank."""
    tied, sizes = layout.config.model.tie_embeddings, Dimensions.of_micro_batch(layout)
    chunks = layout.stage_chunks(stage)
    declared = (
        list(EMBEDDING_PARAMETERS) if any(chunk.has_embedding or (chunk.has_head and tied) for chunk in chunks) else []
    )
    for index in sorted(index for chunk in chunks for index in chunk.layers):
        declared += [(f"model.layers.{index}.{name}", *rest) for name, *rest in LAYER_PARAMETERS]
    if any(chunk.has_head for chunk in chunks):
        declared += HEAD_PARAMETERS[: 1 if tied else 2]
    return [
        LocalParameter(
            name,
            sizes.local_numel(shape),
            1 if shape == "h" else 2,
            tp_sum_rule,
            _stages_with_parameter(layout, stage, name, tied),
        )
        for name, shape, tp_sum_rule in declared
    ]


def _stages_with_parameter(layout: RunLayout, stage: int, name: str, tied: bool) -> tuple[int, ...]:
    """Return the pipeline stages that have a parameter of `stage`: two for a tied embedding, else one."""
    if tied and name == EMBEDDING_PARAMETERS[0][0] and layout.schedule:
        return first_and_last_stages(layout.schedule)
    return (stage,)


def replica_tp_coords(layout: RunLayout, parameter: LocalParameter, rank: int) -> range:
    """Return the tp coordinates of the ranks that hold the same elements of a parameter as `rank` does."""
    own, size, heads = layout.mesh.coords(rank)["tp"], layout.mesh.tp, layout.config.model.num_kv_heads
    if parameter.dimensions == 1:
        return range(size)
    replicas = max(1, size // heads) if parameter.tp_sum_rule == "kv_head_replicas" else 1
    return range(own // replicas * replicas, own // replicas * replicas + replicas)


def count_parameter_tensors(model: ModelConfig) -> int:
    """Return the number of parameter tensors of the whole model; an embedding tied to the head counts once."""
    head = HEAD_PARAMETERS[: 1 if model.tie_embeddings else 2]
    return len(EMBEDDING_PARAMETERS) + model.num_layers * len(LAYER_PARAMETERS) + len(head)


class FlatParamSize(NamedTuple):
    """The size of a flat parameter (parameters concatenated in one buffer).

    numel: elements, padding included. shard_numel: elements of one rank's shard, equal to numel if nothing is sharded.
    moments: how many numbers the optimizer keeps per element.
    """

    numel: int
    shard_numel: int
    moments: int


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model states on one rank.

    masters: master weights, 0 where the optimizer updates the parameters themselves. moments: the optimizer states,
    with DiLoCo's outer state and quantization errors.
    """

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients, masters and moments together."""
        return self.parameters + self.gradients + self.masters + self.moments


def pad_to_shards(numel: int, shards: int, moments: int) -> FlatParamSize:
    """Return the size of a flat parameter of `numel` elements after padding it so that its `shards` shards are equal.

    moments: how many numbers the optimizer keeps per element.
    """
    shard_numel = -(-numel // shards)
    return FlatParamSize(shard_numel * shards, shard_numel, moments)


def moments_per_element(optim: OptimConfig, *, hidden_matrix: bool) -> int:
    """Return how many numbers the optimizer keeps per parameter element: 2 with AdamW, 1 or 0 with SGD.

    hidden_matrix: whether the parameter is a weight matrix of a layer, for which Muon keeps one; else Muon keeps two.
    """
    if optim.kind == "sgd":
        return 1 if optim.momentum else 0
    return 1 if optim.kind == "muon" and hidden_matrix else 2


def outer_bytes_per_element(consistency: ConsistencyConfig, policy: Policy) -> int:
    """Return the bytes of DiLoCo's outer state per element of the masters; 0 in the other synchronization modes.

    The outer state is the parameters at the last averaging and the outer momentum, both in at least float32.
    """
    return 2 * master_bytes_when_merged(policy) if consistency.mode == "diloco" else 0


def error_bytes_per_element(consistency: ConsistencyConfig, policy: Policy) -> int:
    """Return the bytes of the quantization error per element of the masters; 0 unless replicas quantize."""
    return master_bytes_when_merged(policy) if consistency.quantizes else 0


def master_bytes_when_merged(policy: Policy) -> int:
    """Return the bytes of an element of the masters while replicas are averaged, in at least float32."""
    return max(PRECISION_BYTES[policy.master or policy.state], PRECISION_BYTES["fp32"])


def model_states(flat_params: Iterable[FlatParamSize], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """Return the bytes of the model states on one rank, given its flat parameters, ZeRO stage and dtypes.

    flat_params: the sizes of the rank's flat parameters. policy: the dtype of each kind of tensor.

    Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1. In bytes per element, with N shards: stage
    0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2 `p + (a + m + s)/N`, or as stage 1 if gradients stay
    unsharded; stage 3 `(p + a + m + s)/N`. p, a, m and s are the bytes of a parameter, accumulated gradient, master
    weight and all moments: 2, 2, 4 and 8 with fp16 throughout and AdamW, together sixteen.
    """
    flat_params = list(flat_params)
    full, sharded = sum(flat.numel for flat in flat_params), sum(flat.shard_numel for flat in flat_params)
    return ModelStates(
        parameters=(sharded if zero.stage == 3 else full) * PRECISION_BYTES[policy.parameter],
        gradients=(sharded if zero.shards_gradients else full) * PRECISION_BYTES[policy.accumulate],
        masters=sharded * PRECISION_BYTES[policy.master] if policy.separate_masters else 0,
        moments=sum(flat.shard_numel * flat.moments for flat in flat_params) * PRECISION_BYTES[policy.state],
    )
