"""The tensors that autograd saves for backward, each with its shape formula and dtype.

Two models are described. The package's own transformer, as torch's CPU kernels save its activations; a test compares
these lists, to the byte, with what real runs save. And the GPT block of Korthikanti et al. 2022 (arXiv 2205.05198,
section 4); its list gives the published formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.tools.estimate.layout import RunLayout

PARAMETER, COMPUTE = "parameter", "compute"  # placeholders for `RunLayout.dtype` and `RunLayout.compute_dtype`

HIDDEN = "b s/cp h"  # a hidden state inside a tensor-parallel region
SHARDED_HIDDEN = "b s/cp/sp h"  # a hidden state between two regions, where sequence parallelism shards it
TOKENS = "b s/cp"


class SymbolicTensor(NamedTuple):
    """A tensor that autograd saves for backward, with its shape as a formula.

    shape: the formula, such as "b s/cp h" (see `shapes.Dimensions`). dtype: PARAMETER, COMPUTE or a key of DTYPE_BYTES.
    core: whether core attention (scores, softmax, product with the values) saves the tensor; selective recomputation
    drops and recomputes these tensors.
    """

    name: str
    shape: str
    dtype: str = PARAMETER
    core: bool = False


def rotary_tables(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the cosine and sine tables of the rotary position embedding, which all micro-batches share."""
    return [SymbolicTensor("cos", "s/cp 1 d", COMPUTE), SymbolicTensor("sin", "s/cp 1 d", COMPUTE)]


def saved_by_embedding(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the tensors that the embedding saves for backward.

    They are the token ids, a mask of the ids that other ranks look up (if the vocabulary is sharded over tp), and the
    tensors of the embedding's dropout.
    """
    mask = [SymbolicTensor("mask of other ranks' tokens", TOKENS, "bool")] if layout.mesh.tp > 1 else []
    return [SymbolicTensor("tokens", TOKENS, "int64"), *mask, *_dropout_mask(layout)]


def saved_by_layer(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the tensors that one layer saves in forward, given the configured recomputation
    (`minidist/recompute.py`)."""
    recompute = layout.config.recompute
    if recompute == "block":
        return [SymbolicTensor("input of layer", SHARDED_HIDDEN), *_dropout_addresses(layout)]
    if recompute == "selective":
        # Core attention takes queries, keys and values. Ulysses exchanges heads first and saves what it received, so
        # recomputation has to keep the tensors from before the exchange instead.
        before_exchange = _queries_keys_values() if _uses_ulysses(layout) else []
        return drop_recomputed(saved_by_layer_without_recompute(layout), "core") + before_exchange
    return saved_by_layer_without_recompute(layout)


def recomputed_by_layer(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the tensors that one layer saves when full recomputation runs its forward again in backward.

    The layer's input is left out where it has been kept since the first forward.
    """
    saved = saved_by_layer_without_recompute(layout)
    return saved[1:] if layout.dtype == layout.compute_dtype else saved  # otherwise the first norm upcasts its input


def saved_for_weight_gradients() -> list[SymbolicTensor]:
    """Return the tensors that a layer keeps between input gradient (B) and weight gradient (W) of a split backward.

    They are the inputs of its projections and the gradients of their outputs.
    """
    inputs = [SymbolicTensor("input of attention", HIDDEN), SymbolicTensor("input of o", "b s/cp heads/tp d")]
    inputs += [SymbolicTensor("input of feed-forward", HIDDEN), SymbolicTensor("input of down", "b s/cp f/tp")]
    features = {"q": "heads/tp d", "k": "kv/tp d", "v": "kv/tp d", "gate": "f/tp", "up": "f/tp"}
    grads = [SymbolicTensor(f"gradient of {name}", f"{TOKENS} {size}") for name, size in features.items()]
    return inputs + grads + [SymbolicTensor("gradient of o", HIDDEN), SymbolicTensor("gradient of down", HIDDEN)]


def saved_for_head_weight_gradient() -> list[SymbolicTensor]:
    """Return the tensors that the head keeps between input gradient (B) and weight gradient (W) of a split backward."""
    return [SymbolicTensor("input of head", HIDDEN), SymbolicTensor("gradient of logits", f"{TOKENS} vocab/tp")]


def saved_by_layer_without_recompute(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the tensors that autograd saves in one layer if nothing is recomputed.

    The layer has attention and SwiGLU, each with norm and dropout.
    """
    return [
        *_saved_by_norm(layout, "attention"),
        *_saved_by_attention(layout),
        *_dropout_mask(layout),
        *_saved_by_norm(layout, "feed-forward"),
        SymbolicTensor("gate", "b s/cp f/tp"),
        SymbolicTensor("up", "b s/cp f/tp"),
        SymbolicTensor("silu of gate", "b s/cp f/tp"),
        SymbolicTensor("input of down", "b s/cp f/tp"),
        *_dropout_mask(layout),
    ]


def saved_by_head(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the tensors that final norm, head and loss save for backward; with tp > 1 the loss is
    vocabulary-parallel."""
    norm = _saved_by_norm(layout, "head")
    if layout.mesh.tp == 1:
        loss = [
            SymbolicTensor("log-probabilities", f"{TOKENS} vocab", COMPUTE),
            SymbolicTensor("labels", TOKENS, "int64"),
        ]
        return [*norm, *loss, SymbolicTensor("total weight of labels", "", COMPUTE)]
    loss = [
        SymbolicTensor("probabilities", f"{TOKENS} vocab/tp", COMPUTE),
        SymbolicTensor("label columns", TOKENS, "int64"),
    ]
    masks = [SymbolicTensor("mask of this rank's labels", TOKENS, "bool"), SymbolicTensor("label mask", TOKENS, "bool")]
    return [*norm, *loss, *masks]


def _saved_by_norm(layout: RunLayout, consumer: str) -> list[SymbolicTensor]:
    """RMSNorm, in at least float32, and its output, which the projections behind it save as their input."""
    upcast = [SymbolicTensor("weight of norm, upcast", "h", COMPUTE)] if layout.dtype != layout.compute_dtype else []
    return [
        SymbolicTensor("input of norm", SHARDED_HIDDEN, COMPUTE),
        SymbolicTensor("1 / root mean square", "b s/cp/sp 1", COMPUTE),
        SymbolicTensor("normalised", SHARDED_HIDDEN, COMPUTE),
        *upcast,
        SymbolicTensor(f"input of {consumer}", HIDDEN),
    ]


def _saved_by_attention(layout: RunLayout) -> list[SymbolicTensor]:
    """Fused attention saves no scores, only one log-sum-exp per query; ring attention does the same for its shard."""
    if _uses_ulysses(layout):
        return [
            SymbolicTensor("query, key, value", "b exchanged/cp s d", core=True),
            SymbolicTensor("log-sum-exp", "b heads/tp/cp s", COMPUTE, core=True),
            SymbolicTensor("attention output", "b heads/tp/cp s d", core=True),
            SymbolicTensor("input of o", "b s/cp heads/tp d"),
        ]
    return [
        *_queries_keys_values(),
        SymbolicTensor("log-sum-exp", "b heads/tp s/cp", COMPUTE, core=True),
        SymbolicTensor("input of o", "b s/cp heads/tp d"),
    ]


def _queries_keys_values() -> list[SymbolicTensor]:
    """Return the rotated queries, keys and values of one layer, which attention saves."""
    kv_shape = "b kv/tp s/cp d"
    return [
        SymbolicTensor("query", "b heads/tp s/cp d"),
        SymbolicTensor("key", kv_shape),
        SymbolicTensor("value", kv_shape),
    ]


def _uses_ulysses(layout: RunLayout) -> bool:
    """Return whether attention runs as Ulysses, with an all-to-all of heads and sequence."""
    return layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses"


def _dropout_addresses(layout: RunLayout) -> list[SymbolicTensor]:
    """The tensors from which the dropout of each branch regenerates its mask: two per token, one per feature."""
    if not layout.config.model.dropout:
        return []
    tokens = SymbolicTensor("dropout token addresses", "b s/cp/sp", "int32")
    return 2 * [tokens, tokens, SymbolicTensor("dropout feature addresses", "h", "int32")]


def _dropout_mask(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the mask that one dropout saves; [] without dropout."""
    return [SymbolicTensor("dropout mask", SHARDED_HIDDEN, "bool")] if layout.config.model.dropout else []


# The GPT block of Korthikanti et al. 2022, section 4.1: its attention saves the scores (softmax and its dropout), its
# feed-forward layer has 4 h features and GeLU. With sequence parallelism, inputs of the tensor-parallel regions are
# saved sharded and gathered again in backward (section 4.2.2).
GPT_BLOCK: Sequence[SymbolicTensor] = (
    SymbolicTensor("input of norm", SHARDED_HIDDEN),
    SymbolicTensor("input of q, k, v", SHARDED_HIDDEN),
    SymbolicTensor("query", "b heads/tp s d"),
    SymbolicTensor("key", "b heads/tp s d"),
    SymbolicTensor("softmax", "b heads/tp s s", core=True),
    SymbolicTensor("softmax dropout mask", "b heads/tp s s", "bool", core=True),
    SymbolicTensor("softmax after dropout", "b heads/tp s s", core=True),
    SymbolicTensor("value", "b heads/tp s d"),
    SymbolicTensor("input of projection", "b s heads/tp d"),
    SymbolicTensor("dropout mask", SHARDED_HIDDEN, "bool"),
    SymbolicTensor("input of norm", SHARDED_HIDDEN),
    SymbolicTensor("input of feed-forward", SHARDED_HIDDEN),
    SymbolicTensor("input of GeLU", "b s f/tp"),
    SymbolicTensor("GeLU", "b s f/tp"),
    SymbolicTensor("dropout mask", SHARDED_HIDDEN, "bool"),
)


def drop_recomputed(tensors: Sequence[SymbolicTensor], recomputed: str) -> list[SymbolicTensor]:
    """Return the saved tensors of a layer that forward still saves if backward recomputes a part of the layer.

    recomputed: the recomputed part: "core" (core attention), "layer" (all but the layer's input) or "" (nothing).
    """
    if recomputed == "layer":
        return list(tensors[:1])
    return [tensor for tensor in tensors if not (recomputed and tensor.core)]
