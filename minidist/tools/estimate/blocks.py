"""What blocks keep for backward: lists of saved tensors, each with its shape, its dtype and the axes that divide it.

Two models are described. Ours, as torch's kernels for CPU keep it; a test finds the same tensors, to the byte, in real
runs. And the block of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), in whose published formulas it results.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.tools.estimate.layout import Layout

PARAMETER, COMPUTE = "parameter", "compute"  # dtypes that the layout knows: `Layout.dtype`, `Layout.compute_dtype`

WHOLE = "b s/cp h"  # a hidden state inside the operators that tensor ranks share
BETWEEN = "b s/cp/sp h"  # and between them
TOKENS = "b s/cp"


class Saved(NamedTuple):
    """One tensor. shape: a formula (`shapes.Sizes`). core: what attention's core keeps for itself, which selective
    recomputation drops and computes again."""

    name: str
    shape: str
    dtype: str = PARAMETER
    core: bool = False


def positions(layout: Layout) -> list[Saved]:
    """The rotary tables, whatever the samples."""
    return [Saved("cos", "s/cp 1 d", COMPUTE), Saved("sin", "s/cp 1 d", COMPUTE)]


def embedding(layout: Layout) -> list[Saved]:
    """Looked-up tokens; with a shared vocabulary also which of them other ranks have."""
    elsewhere = [Saved("tokens of other ranks", TOKENS, "bool")] if layout.mesh.tp > 1 else []
    return [Saved("tokens", TOKENS, "int64"), *elsewhere, *_dropped(layout)]


def layer(layout: Layout) -> list[Saved]:
    """What a layer keeps from forward to backward, as `minidist/recompute.py` has it keep."""
    how = layout.config.recompute
    if how == "block":
        return [Saved("input of layer", BETWEEN), *_addresses(layout)]
    if how == "selective":
        return without(forward(layout), "core") + (_exchanged_from(layout) if _ulysses(layout) else [])
    return forward(layout)


def again(layout: Layout) -> list[Saved]:
    """What a layer that is computed again as a whole makes, besides the input that it kept."""
    saved = forward(layout)
    return saved[1:] if layout.dtype == layout.compute_dtype else saved  # else its first norm widens the input


def halves() -> list[Saved]:
    """What a layer holds between the halves of its backward: the inputs of the projections that have a weight half,
    and the gradients of what they gave."""
    inputs = [Saved("input of attention", WHOLE), Saved("input of o", "b s/cp heads/tp d")]
    inputs += [Saved("input of feed-forward", WHOLE), Saved("input of down", "b s/cp f/tp")]
    wide = {"q": "heads/tp d", "k": "kv/tp d", "v": "kv/tp d", "gate": "f/tp", "up": "f/tp"}
    grads = [Saved(f"gradient of {name}", f"{TOKENS} {features}") for name, features in wide.items()]
    return inputs + grads + [Saved("gradient of o", WHOLE), Saved("gradient of down", WHOLE)]


def end_halves() -> list[Saved]:
    """The same of the head."""
    return [Saved("input of head", WHOLE), Saved("gradient of logits", f"{TOKENS} vocab/tp")]


def forward(layout: Layout) -> list[Saved]:
    """What autograd saves in a pre-norm block: attention and SwiGLU, each with its norm and its dropout."""
    return [
        *_norm(layout, "attention"),
        *_attention(layout),
        *_dropped(layout),
        *_norm(layout, "feed-forward"),
        Saved("gate", "b s/cp f/tp"),
        Saved("up", "b s/cp f/tp"),
        Saved("silu of gate", "b s/cp f/tp"),
        Saved("input of down", "b s/cp f/tp"),
        *_dropped(layout),
    ]


def end(layout: Layout) -> list[Saved]:
    """The last norm and the loss; with a shared vocabulary the loss of `parallel/tensor/vocabulary`."""
    norm = _norm(layout, "head")
    if layout.mesh.tp == 1:
        loss = [Saved("logarithms of probabilities", f"{TOKENS} vocab", COMPUTE), Saved("labels", TOKENS, "int64")]
        return [*norm, *loss, Saved("weight of all labels", "", COMPUTE)]
    shared = [Saved("probabilities", f"{TOKENS} vocab/tp", COMPUTE), Saved("columns of labels", TOKENS, "int64")]
    return [*norm, *shared, Saved("labels here", TOKENS, "bool"), Saved("labels that count", TOKENS, "bool")]


def _norm(layout: Layout, of: str) -> list[Saved]:
    """RMSNorm, in at least float32, and what it gives to the projections, which keep it as their input."""
    copied = [Saved("norm's weight, widened", "h", COMPUTE)] if layout.dtype != layout.compute_dtype else []
    return [
        Saved("input of norm", BETWEEN, COMPUTE),
        Saved("1 / root mean square", "b s/cp/sp 1", COMPUTE),
        Saved("normalised", BETWEEN, COMPUTE),
        *copied,
        Saved(f"input of {of}", WHOLE),
    ]


def _attention(layout: Layout) -> list[Saved]:
    """Fused attention keeps no scores, but a number per query; a ring keeps the same of this rank's part."""
    if _ulysses(layout):
        return [
            Saved("query, key, value", "b exchanged/cp s d", core=True),
            Saved("log-sum-exp", "b heads/tp/cp s", COMPUTE, core=True),
            Saved("mixed", "b heads/tp/cp s d", core=True),
            Saved("input of o", "b s/cp heads/tp d"),
        ]
    return [
        Saved("query", "b heads/tp s/cp d"),
        Saved("key", "b kv/tp s/cp d"),
        Saved("value", "b kv/tp s/cp d"),
        Saved("log-sum-exp", "b heads/tp s/cp", COMPUTE, core=True),
        Saved("input of o", "b s/cp heads/tp d"),
    ]


def _ulysses(layout: Layout) -> bool:
    return layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses"


def _exchanged_from(layout: Layout) -> list[Saved]:
    """Attention's core takes these, and where it exchanges heads it keeps the copies that it got instead."""
    return [Saved("query", "b heads/tp s/cp d"), Saved("key", "b kv/tp s/cp d"), Saved("value", "b kv/tp s/cp d")]


def _addresses(layout: Layout) -> list[Saved]:
    """Of the dropout after each branch: two numbers a token, and one a feature."""
    if not layout.config.model.dropout:
        return []
    tokens = Saved("dropout's tokens", "b s/cp/sp", "int32")
    return 2 * [tokens, tokens, Saved("dropout's features", "h", "int32")]


def _dropped(layout: Layout) -> list[Saved]:
    return [Saved("dropout mask", BETWEEN, "bool")] if layout.config.model.dropout else []


# The GPT block of Korthikanti et al. 2022, section 4.1: its attention keeps the scores (softmax and its dropout), its
# feed-forward layer has 4 h features and GeLU. With sequence parallelism the inputs of operators are kept as parts, and
# gathered again in backward (section 4.2.2).
GPT: Sequence[Saved] = (
    Saved("input of norm", BETWEEN),
    Saved("input of q, k, v", BETWEEN),
    Saved("query", "b heads/tp s d"),
    Saved("key", "b heads/tp s d"),
    Saved("softmax", "b heads/tp s s", core=True),
    Saved("mask of softmax", "b heads/tp s s", "bool", core=True),
    Saved("dropped softmax", "b heads/tp s s", core=True),
    Saved("value", "b heads/tp s d"),
    Saved("input of projection", "b s heads/tp d"),
    Saved("dropout mask", BETWEEN, "bool"),
    Saved("input of norm", BETWEEN),
    Saved("input of feed-forward", BETWEEN),
    Saved("input of GeLU", "b s f/tp"),
    Saved("GeLU", "b s f/tp"),
    Saved("dropout mask", BETWEEN, "bool"),
)


def without(tensors: Sequence[Saved], recomputed: str) -> list[Saved]:
    """What is left when backward computes some of them again: "core" those of attention's core, "layer" all but the
    layer's input, "" none."""
    if recomputed == "layer":
        return list(tensors[:1])
    return [each for each in tensors if not (recomputed and each.core)]
