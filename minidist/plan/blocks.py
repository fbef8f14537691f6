"""What blocks keep for backward: lists of saved tensors, each with its shape, its dtype and the axes that divide it.

Two models are described. Ours, as torch's kernels for CPU keep it; a test finds the same tensors, to the byte, in real
runs. And the block of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), in whose published formulas it results.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.plan.layout import Layout

PARAMETER, COMPUTE = "parameter", "compute"  # dtypes that the layout knows: `Layout.dtype`, `Layout.compute_dtype`

WHOLE = "b s/cp h"  # a hidden state inside the operators that tensor ranks share
BETWEEN = "b s/cp/sp h"  # and between them
TOKENS = "b s/cp"


class Saved(NamedTuple):
    """One tensor. shape: a formula (`shapes.Sizes`). core: what selective recomputation drops and computes again."""

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
    """A pre-norm block: attention and SwiGLU, each with its norm and its dropout."""
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
    if layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses":
        return [
            Saved("query, key, value", "b exchanged/cp s d"),
            Saved("log-sum-exp", "b heads/tp/cp s", COMPUTE),
            Saved("mixed", "b heads/tp/cp s d"),
            Saved("input of o", "b s/cp heads/tp d"),
        ]
    return [
        Saved("query", "b heads/tp s/cp d"),
        Saved("key", "b kv/tp s/cp d"),
        Saved("value", "b kv/tp s/cp d"),
        Saved("log-sum-exp", "b heads/tp s/cp", COMPUTE),
        Saved("input of o", "b s/cp heads/tp d"),
    ]


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
