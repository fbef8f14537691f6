"""The tensors that autograd saves for backward, each with its shape formula and dtype.

Two models are described. The package's own transformer, as torch's CPU kernels save its activations; a test compares
these lists, to the byte, with what real runs save. And the GPT block of Korthikanti et al. 2022 (arXiv 2205.05198,
section 4); its list gives the published formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.tools.estimate.layout import Layout

PARAMETER, COMPUTE = "parameter", "compute"  # placeholders for `Layout.dtype` and `Layout.compute_dtype`

HIDDEN = "b s/cp h"  # a hidden state inside a tensor-parallel region
SHARDED_HIDDEN = "b s/cp/sp h"  # a hidden state between two regions, where sequence parallelism shards it
TOKENS = "b s/cp"


class SavedTensor(NamedTuple):
    """A tensor that autograd saves for backward, with its shape as a formula.

    shape: the formula, such as "b s/cp h" (see `shapes.Dimensions`). dtype: PARAMETER, COMPUTE or a key of DTYPE_BYTES.
    core: whether core attention (scores, softmax, product with the values) saves the tensor; selective recomputation
    drops and recomputes these tensors.
    """

    name: str
    shape: str
    dtype: str = PARAMETER
    core: bool = False


def rotary_tables(layout: Layout) -> list[SavedTensor]:
    """Return the cosine and sine tables of the rotary position embedding, which all micro-batches share."""
    return [SavedTensor("cos", "s/cp 1 d", COMPUTE), SavedTensor("sin", "s/cp 1 d", COMPUTE)]


def saved_by_embedding(layout: Layout) -> list[SavedTensor]:
    """Return the tensors that the embedding saves for backward.

    They are the token ids, a mask of the ids that other ranks look up (if the vocabulary is sharded over tp), and the
    tensors of the embedding's dropout.
    """
    mask = [SavedTensor("mask of other ranks' tokens", TOKENS, "bool")] if layout.mesh.tp > 1 else []
    return [SavedTensor("tokens", TOKENS, "int64"), *mask, *_dropout_mask(layout)]


def saved_by_layer(layout: Layout) -> list[SavedTensor]:
    """Return the tensors that one layer saves in forward, given the configured recomputation
    (`minidist/recompute.py`)."""
    recompute = layout.config.recompute
    if recompute == "block":
        return [SavedTensor("input of layer", SHARDED_HIDDEN), *_dropout_addresses(layout)]
    if recompute == "selective":
        # Core attention takes queries, keys and values. Ulysses exchanges heads first and saves what it received, so
        # recomputation has to keep the tensors from before the exchange instead.
        before_exchange = _queries_keys_values() if _uses_ulysses(layout) else []
        return drop_recomputed(saved_by_layer_without_recompute(layout), "core") + before_exchange
    return saved_by_layer_without_recompute(layout)


def recomputed_by_layer(layout: Layout) -> list[SavedTensor]:
    """Return the tensors that one layer saves when full recomputation runs its forward again in backward.

    The layer's input is left out where it has been kept since the first forward.
    """
    saved = saved_by_layer_without_recompute(layout)
    return saved[1:] if layout.dtype == layout.compute_dtype else saved  # otherwise the first norm upcasts its input


def saved_for_weight_gradients() -> list[SavedTensor]:
    """Return the tensors that a layer keeps between input gradient (B) and weight gradient (W) of a split backward.

    They are the inputs of its projections and the gradients of their outputs.
    """
    inputs = [SavedTensor("input of attention", HIDDEN), SavedTensor("input of o", "b s/cp heads/tp d")]
    inputs += [SavedTensor("input of feed-forward", HIDDEN), SavedTensor("input of down", "b s/cp f/tp")]
    features = {"q": "heads/tp d", "k": "kv/tp d", "v": "kv/tp d", "gate": "f/tp", "up": "f/tp"}
    grads = [SavedTensor(f"gradient of {name}", f"{TOKENS} {size}") for name, size in features.items()]
    return inputs + grads + [SavedTensor("gradient of o", HIDDEN), SavedTensor("gradient of down", HIDDEN)]


def saved_for_head_weight_gradient() -> list[SavedTensor]:
    """Return the tensors that the head keeps between input gradient (B) and weight gradient (W) of a split backward."""
    return [SavedTensor("input of head", HIDDEN), SavedTensor("gradient of logits", f"{TOKENS} vocab/tp")]


def saved_by_layer_without_recompute(layout: Layout) -> list[SavedTensor]:
    """Return the tensors that autograd saves in one layer if nothing is recomputed.

    The layer has attention and SwiGLU, each with norm and dropout.
    """
    return [
        *_saved_by_norm(layout, "attention"),
        *_saved_by_attention(layout),
        *_dropout_mask(layout),
        *_saved_by_norm(layout, "feed-forward"),
        SavedTensor("gate", "b s/cp f/tp"),
        SavedTensor("up", "b s/cp f/tp"),
        SavedTensor("silu of gate", "b s/cp f/tp"),
        SavedTensor("input of down", "b s/cp f/tp"),
        *_dropout_mask(layout),
    ]


def saved_by_head(layout: Layout) -> list[SavedTensor]:
    """Return the tensors that final norm, head and loss save for backward; with tp > 1 the loss is
    vocabulary-parallel."""
    norm = _saved_by_norm(layout, "head")
    if layout.mesh.tp == 1:
        loss = [SavedTensor("log-probabilities", f"{TOKENS} vocab", COMPUTE), SavedTensor("labels", TOKENS, "int64")]
        return [*norm, *loss, SavedTensor("total weight of labels", "", COMPUTE)]
    loss = [SavedTensor("probabilities", f"{TOKENS} vocab/tp", COMPUTE), SavedTensor("label columns", TOKENS, "int64")]
    masks = [SavedTensor("mask of this rank's labels", TOKENS, "bool"), SavedTensor("label mask", TOKENS, "bool")]
    return [*norm, *loss, *masks]


def _saved_by_norm(layout: Layout, consumer: str) -> list[SavedTensor]:
    """RMSNorm, in at least float32, and its output, which the projections behind it save as their input."""
    upcast = [SavedTensor("weight of norm, upcast", "h", COMPUTE)] if layout.dtype != layout.compute_dtype else []
    return [
        SavedTensor("input of norm", SHARDED_HIDDEN, COMPUTE),
        SavedTensor("1 / root mean square", "b s/cp/sp 1", COMPUTE),
        SavedTensor("normalised", SHARDED_HIDDEN, COMPUTE),
        *upcast,
        SavedTensor(f"input of {consumer}", HIDDEN),
    ]


def _saved_by_attention(layout: Layout) -> list[SavedTensor]:
    """Fused attention saves no scores, only one log-sum-exp per query; ring attention does the same for its shard."""
    if _uses_ulysses(layout):
        return [
            SavedTensor("query, key, value", "b exchanged/cp s d", core=True),
            SavedTensor("log-sum-exp", "b heads/tp/cp s", COMPUTE, core=True),
            SavedTensor("attention output", "b heads/tp/cp s d", core=True),
            SavedTensor("input of o", "b s/cp heads/tp d"),
        ]
    return [
        *_queries_keys_values(),
        SavedTensor("log-sum-exp", "b heads/tp s/cp", COMPUTE, core=True),
        SavedTensor("input of o", "b s/cp heads/tp d"),
    ]


def _queries_keys_values() -> list[SavedTensor]:
    kv_shape = "b kv/tp s/cp d"
    return [SavedTensor("query", "b heads/tp s/cp d"), SavedTensor("key", kv_shape), SavedTensor("value", kv_shape)]


def _uses_ulysses(layout: Layout) -> bool:
    return layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses"


def _dropout_addresses(layout: Layout) -> list[SavedTensor]:
    """The tensors from which the dropout of each branch regenerates its mask: two per token, one per feature."""
    if not layout.config.model.dropout:
        return []
    tokens = SavedTensor("dropout token addresses", "b s/cp/sp", "int32")
    return 2 * [tokens, tokens, SavedTensor("dropout feature addresses", "h", "int32")]


def _dropout_mask(layout: Layout) -> list[SavedTensor]:
    return [SavedTensor("dropout mask", SHARDED_HIDDEN, "bool")] if layout.config.model.dropout else []


# The GPT block of Korthikanti et al. 2022, section 4.1: its attention saves the scores (softmax and its dropout), its
# feed-forward layer has 4 h features and GeLU. With sequence parallelism, inputs of the tensor-parallel regions are
# saved sharded and gathered again in backward (section 4.2.2).
GPT_BLOCK: Sequence[SavedTensor] = (
    SavedTensor("input of norm", SHARDED_HIDDEN),
    SavedTensor("input of q, k, v", SHARDED_HIDDEN),
    SavedTensor("query", "b heads/tp s d"),
    SavedTensor("key", "b heads/tp s d"),
    SavedTensor("softmax", "b heads/tp s s", core=True),
    SavedTensor("softmax dropout mask", "b heads/tp s s", "bool", core=True),
    SavedTensor("softmax after dropout", "b heads/tp s s", core=True),
    SavedTensor("value", "b heads/tp s d"),
    SavedTensor("input of projection", "b s heads/tp d"),
    SavedTensor("dropout mask", SHARDED_HIDDEN, "bool"),
    SavedTensor("input of norm", SHARDED_HIDDEN),
    SavedTensor("input of feed-forward", SHARDED_HIDDEN),
    SavedTensor("input of GeLU", "b s f/tp"),
    SavedTensor("GeLU", "b s f/tp"),
    SavedTensor("dropout mask", SHARDED_HIDDEN, "bool"),
)


def drop_recomputed(tensors: Sequence[SavedTensor], recomputed: str) -> list[SavedTensor]:
    """Return the saved tensors of a layer that forward still saves if backward recomputes a part of the layer.

    recomputed: the recomputed part: "core" (core attention), "layer" (all but the layer's input) or "" (nothing).
    """
    if recomputed == "layer":
        return list(tensors[:1])
    return [tensor for tensor in tensors if not (recomputed and tensor.core)]
