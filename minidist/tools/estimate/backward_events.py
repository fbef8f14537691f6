"""The points of backward at which memory can peak, with the temporary tensors of each.

Temporaries are all tensors but the saved ones. They follow torch's CPU kernels and autograd: an operation allocates its
results before its inputs are freed, and a gradient with two contributions is summed into a third tensor. Not modelled:
the kernels' own workspaces (on some CPUs 16-bit matrix products pack their factors; attention uses a little per
thread), and the tensors that context-parallel ranks exchange, except the largest ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.tools.estimate import saved_tensors
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.saved_tensors import COMPUTE, HIDDEN, SHARDED_HIDDEN, TOKENS, SymbolicTensor

FEATURES, LOGITS = f"{TOKENS} f/tp", f"{TOKENS} vocab/tp"
QUERIES, KEYS = f"{TOKENS} heads/tp d", f"{TOKENS} kv/tp d"
FOR_WEIGHT_GRADIENT = "kept for the weight gradient"
VOCABULARY_GRADIENT = [SymbolicTensor("gradient of weight", "vocab/tp h")]  # of the head or the embedding
LARGEST_LAYER_GRADIENT = [SymbolicTensor("gradient of weight", "f/tp h")]


class BackwardEvent(NamedTuple):
    """The backward of one operation in a module (a layer, the head or the embedding): a time at which memory can peak.

    operation: the operation's name. num_saved: how many of the module's saved tensors, counted from the first, are
    still live. num_ready_gradients: how many of the module's parameters, counted from the last, have their gradients.
    temporaries: all other live tensors; those named FOR_WEIGHT_GRADIENT are kept for the weight gradient (W) of a split
    backward and count as activations.
    """

    operation: str
    num_saved: int
    num_ready_gradients: int
    temporaries: Sequence[SymbolicTensor]


def layer_backward_events(layout: RunLayout, split_backward: bool) -> list[BackwardEvent]:
    """Return the backward of each operation of one layer, in the order of execution.

    split_backward: whether weight gradients are computed later, so that the tensors they need stay live.
    """
    names = [tensor.name for tensor in saved_tensors.saved_by_layer_without_recompute(layout)]
    attention, feed_forward = (i for i, name in enumerate(names) if name == "input of norm")
    query = next(i for i, name in enumerate(names) if name.startswith("query"))
    product, core = names.index("input of down"), names.index("input of o")
    dropout, waiting = bool(layout.config.model.dropout), []
    name = FOR_WEIGHT_GRADIENT if split_backward else "gradient"  # of a projection's output
    output_grad, up_grad = SymbolicTensor(name, SHARDED_HIDDEN), SymbolicTensor(name, FEATURES)
    input_grad = SymbolicTensor("gradient of input", HIDDEN)
    sharded = layout.sequence_parallel_size > 1
    branch = [SymbolicTensor("gradient of branch", HIDDEN)] * (1 + sharded) if dropout or sharded else []
    features, heads = SymbolicTensor("gradient of features", FEATURES), SymbolicTensor("gradient of heads", QUERIES)
    rotated = SymbolicTensor("gradient before rotation", QUERIES, COMPUTE)
    weight = [] if split_backward else LARGEST_LAYER_GRADIENT

    def keep_for_weight_gradient(*shapes: str) -> None:
        waiting.extend(SymbolicTensor(FOR_WEIGHT_GRADIENT, shape) for shape in shapes if split_backward)

    masked = SymbolicTensor("gradient after dropout", SHARDED_HIDDEN)
    events = [BackwardEvent("dropout", len(names), 0, [output_grad, *3 * [masked]])] if dropout else []
    events.append(BackwardEvent("down", product + 1, 0, [output_grad, *branch, *weight, features]))
    keep_for_weight_gradient(FEATURES)
    events.append(BackwardEvent("product", product, 1, [output_grad, up_grad, *2 * [features], *waiting]))
    up = [output_grad, input_grad, up_grad, features, *weight, *waiting]
    events.append(BackwardEvent("up", names.index("gate") + 1, 1, up))
    keep_for_weight_gradient(FEATURES, FEATURES, HIDDEN)
    # A norm's gradient is added to the residual's in place, unless something else still needs the residual's.
    residual = [output_grad] if split_backward or layout.dtype != layout.compute_dtype else []
    events += _norm_backward(layout, feed_forward, 3, [*residual, *waiting])
    events.append(BackwardEvent("attention", core + 1, 5, [output_grad, heads, *_core_gradients(layout), *waiting]))
    keep_for_weight_gradient(QUERIES, KEYS)
    events.append(BackwardEvent("rotary", query, 7, [output_grad, input_grad, heads, *2 * [rotated], *waiting]))
    keep_for_weight_gradient(KEYS, QUERIES, HIDDEN)
    return events + _norm_backward(layout, attention, 8, [*residual, *waiting])


def _norm_backward(layout: RunLayout, start: int, ready: int, others: Sequence[SymbolicTensor]) -> list[BackwardEvent]:
    """A norm whose saved tensors begin at `start`: its backward uses five tensors of its input's size. With sequence
    parallelism the gradient of its output is reduce-scattered first."""
    buffers = [
        SymbolicTensor("gradient", HIDDEN),
        SymbolicTensor("contiguous copy", HIDDEN),
        SymbolicTensor("shard", SHARDED_HIDDEN),
    ]
    scatter = [BackwardEvent("reduce-scatter", start + 3, ready, [*buffers, *others])]
    inside = 5 * [SymbolicTensor("inside of norm", SHARDED_HIDDEN, COMPUTE)]
    norm = BackwardEvent("norm", start + 2, ready, [*inside, *others])
    return [*(scatter if layout.sequence_parallel_size > 1 else []), norm]


def _core_gradients(layout: RunLayout) -> list[SymbolicTensor]:
    """Gradients of queries, keys and values."""
    if layout.mesh.cp == 1:
        return [
            SymbolicTensor("gradient of queries", QUERIES),
            *2 * [SymbolicTensor("gradient of keys or values", KEYS)],
        ]
    if layout.config.parallel.context == "ulysses":
        return 2 * [SymbolicTensor("gradients of exchanged heads", "b exchanged/cp s d")]
    # A ring accumulates them in at least float32 while those of another rank are in flight.
    keys_values = SymbolicTensor("keys and values", KEYS, COMPUTE)
    return [SymbolicTensor("gradient of queries", QUERIES, COMPUTE)] * 2 + [keys_values] * 6


def layer_forward_temporaries(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the temporary tensors at the memory peak of a layer's forward that saves no tensors (full recomputation).

    The peak is in the feed-forward layer, where the outputs of gate and up projection are multiplied.
    """
    return [
        *3 * [SymbolicTensor("inside feed-forward", FEATURES)],
        *3 * [SymbolicTensor("between attention and feed-forward", HIDDEN)],
    ]


def loss_temporaries(layout: RunLayout) -> list[SymbolicTensor]:
    """Return the temporary tensors at the end of forward, when the loss has saved its last tensor for backward."""
    upcast = [SymbolicTensor("logits, upcast", LOGITS, COMPUTE)] if layout.dtype != layout.compute_dtype else []
    shard = [SymbolicTensor("shard of hidden state", SHARDED_HIDDEN)] if layout.sequence_parallel_size > 1 else []
    return [SymbolicTensor("logits", LOGITS), *upcast, *shard]


def head_backward_events(layout: RunLayout, split_backward: bool) -> list[BackwardEvent]:
    """Return the backward of each operation of loss, head and final norm, in the order of execution.

    split_backward: whether weight gradients are computed later, so that the tensors they need stay live.
    """
    names = [tensor.name for tensor in saved_tensors.saved_by_head(layout)]
    untied, logits_grad = (
        not layout.config.model.tie_embeddings,
        FOR_WEIGHT_GRADIENT if split_backward else "gradient of logits",
    )
    weight = [] if split_backward else VOCABULARY_GRADIENT
    waiting = weight * (not untied)
    if split_backward:
        waiting = [SymbolicTensor(FOR_WEIGHT_GRADIENT, HIDDEN), SymbolicTensor(FOR_WEIGHT_GRADIENT, LOGITS)]
    upcast = logits_grad if layout.dtype == layout.compute_dtype else "gradient of logits, upcast"
    loss = [SymbolicTensor(upcast, LOGITS, COMPUTE), SymbolicTensor("gradient of log-probabilities", LOGITS, COMPUTE)]
    head = [SymbolicTensor(logits_grad, LOGITS), SymbolicTensor("gradient of input", HIDDEN), *weight]
    return [
        BackwardEvent("loss", len(names), 0, loss[: 2 if layout.mesh.tp == 1 else 1]),
        BackwardEvent("head", names.index("input of head") + 1, 0, head),
        *_norm_backward(layout, 0, int(untied), waiting),
    ]


def embedding_backward_events(layout: RunLayout, tied: bool) -> list[BackwardEvent]:
    """Return the backward of each operation of the input embedding, in the order of execution.

    tied: whether the embedding and the head are one parameter, so that the head's gradient is live and the embedding's
    gradient is added to it.
    """
    saved = len(saved_tensors.saved_by_embedding(layout))
    lookup = [SymbolicTensor("gradient", HIDDEN), *VOCABULARY_GRADIENT * (1 + tied)]
    events = [BackwardEvent("embedding", saved, 0, lookup)]
    return [*events, BackwardEvent("tied sum", saved, 0, VOCABULARY_GRADIENT * 3)] if tied else events
