"""What is in memory for a moment only: tensors beside those kept for backward, in the moments in which they are most.

As torch's kernels for CPU and its autograd have it: a backward's results are made before what it read is freed, and a
gradient that comes from two sides is summed into a third tensor. Not in it is what kernels use for themselves (on some
CPUs products in 16 bits pack their factors, attention has a little for each thread), and of what context ranks pass
round only the largest pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.tools.estimate import blocks
from minidist.tools.estimate.blocks import BETWEEN, COMPUTE, TOKENS, WHOLE, Saved
from minidist.tools.estimate.layout import Layout

FEATURES, LOGITS = f"{TOKENS} f/tp", f"{TOKENS} vocab/tp"
QUERIES, KEYS = f"{TOKENS} heads/tp d", f"{TOKENS} kv/tp d"
LATER = "for the weights"
HEAD = [Saved("gradient of weight", "vocab/tp h")]  # or of the embedding
WEIGHT = [Saved("gradient of weight", "f/tp h")]  # the largest of a layer


class Moment(NamedTuple):
    """While one operation of a piece of the model runs. kept: how many of the tensors that the piece keeps for backward
    are still there, from the first on. come: how many of its parameters, from the last on, have their gradients.
    there: what else there is; what waits for the weights' half of backward, by the name LATER, is activations."""

    name: str
    kept: int
    come: int
    there: Sequence[Saved]


def layer(layout: Layout, later: bool) -> list[Moment]:
    """Of a layer's backward. later: its weights' gradients are left for later, and what they are made of stays."""
    names = [tensor.name for tensor in blocks.forward(layout)]
    attention, feed_forward = (i for i, name in enumerate(names) if name == "input of norm")
    projected = next(i for i, name in enumerate(names) if name.startswith("query"))
    product, core = names.index("input of down"), names.index("input of o")
    mask, stays = bool(layout.config.model.dropout), []
    given = LATER if later else "gradient"  # of what a projection gave
    out, into, up = Saved(given, BETWEEN), Saved("gradient of input", WHOLE), Saved(given, FEATURES)
    branch = [Saved("gradient of branch", WHOLE)] * (1 + (layout.sequence > 1)) if mask or layout.sequence > 1 else []
    wide, heads = Saved("gradient of features", FEATURES), Saved("gradient of heads", QUERIES)
    weight = [] if later else WEIGHT
    turned = Saved("turned back", QUERIES, COMPUTE)

    def leave(*shapes: str) -> None:
        stays.extend(Saved(LATER, shape) for shape in shapes if later)

    found = [Moment("dropout", len(names), 0, [out, *3 * [Saved("dropped", BETWEEN)]])] if mask else []
    found.append(Moment("down", product + 1, 0, [out, *branch, *weight, wide]))
    leave(FEATURES)
    found.append(Moment("product", product, 1, [out, up, *2 * [wide], *stays]))
    found.append(Moment("up", names.index("gate") + 1, 1, [out, into, up, wide, *weight, *stays]))
    leave(FEATURES, FEATURES, WHOLE)
    # A norm's gradient is added to the one that passes it by, in that one's place if nobody else needs it.
    past = [out] if later or layout.dtype != layout.compute_dtype else []
    found += _norm(layout, feed_forward, 3, [*past, *stays])
    found.append(Moment("attention", core + 1, 5, [out, heads, *_core(layout), *stays]))
    leave(QUERIES, KEYS)
    found.append(Moment("positions", projected, 7, [out, into, heads, *2 * [turned], *stays]))
    leave(KEYS, QUERIES, WHOLE)
    return found + _norm(layout, attention, 8, [*past, *stays])


def _norm(layout: Layout, at: int, come: int, beside: Sequence[Saved]) -> list[Moment]:
    """Of a norm's backward, whose tensors begin at `at`: it divides its gradient over five of the input's size. Where
    ranks share the sequence, its gradient is put together of theirs before."""
    shared = [Saved("gradient", WHOLE), Saved("laid out", WHOLE), Saved("own part", BETWEEN)]
    before = [Moment("own part", at + 3, come, [*shared, *beside])] if layout.sequence > 1 else []
    return [*before, Moment("norm", at + 2, come, [*5 * [Saved("inside of norm", BETWEEN, COMPUTE)], *beside])]


def _core(layout: Layout) -> list[Saved]:
    """Gradients of queries, keys and values."""
    if layout.mesh.cp == 1:
        return [Saved("gradient of queries", QUERIES), *2 * [Saved("gradient of keys or values", KEYS)]]
    if layout.config.parallel.context == "ulysses":
        return 2 * [Saved("gradients of exchanged heads", "b exchanged/cp s d")]
    # A ring adds them up in at least float32, while those of another rank are on their way.
    return [Saved("gradient of queries", QUERIES, COMPUTE)] * 2 + [Saved("keys and values", KEYS, COMPUTE)] * 6


def forgotten(layout: Layout) -> list[Saved]:
    """What a layer has made, at most, when nothing of it is kept: in its feed-forward layer's product."""
    return [*3 * [Saved("inside feed-forward", FEATURES)], *3 * [Saved("between its parts", WHOLE)]]


def loss(layout: Layout) -> list[Saved]:
    """What there is at the end of forward, when the last thing is made that is kept."""
    wide = [Saved("widened", LOGITS, COMPUTE)] if layout.dtype != layout.compute_dtype else []
    own = [Saved("own part", BETWEEN)] if layout.sequence > 1 else []
    return [Saved("logits", LOGITS), *wide, *own]


def end(layout: Layout, later: bool) -> list[Moment]:
    """Of the backward of loss, head and last norm."""
    names = [tensor.name for tensor in blocks.end(layout)]
    untied, given = not layout.config.model.tie_embeddings, LATER if later else "gradient of logits"
    weight = [] if later else HEAD
    stays = [Saved(LATER, WHOLE), Saved(LATER, LOGITS)] if later else weight * (not untied)
    same = given if layout.dtype == layout.compute_dtype else "widened"
    wide = [Saved(same, LOGITS, COMPUTE), Saved("of probabilities", LOGITS, COMPUTE)]
    return [
        Moment("gradient of loss", len(names), 0, wide[: 2 if layout.mesh.tp == 1 else 1]),
        Moment("head", names.index("input of head") + 1, 0, [Saved(given, LOGITS), Saved("", WHOLE), *weight]),
        *_norm(layout, 0, int(untied), stays),
    ]


def embedding(layout: Layout, tied: bool) -> list[Moment]:
    """Of the embedding's backward. tied: a gradient of the head waits to be added."""
    kept = len(blocks.embedding(layout))
    found = [Moment("embedding", kept, 0, [Saved("gradient", WHOLE), *HEAD * (1 + tied)])]
    return [*found, Moment("both ends", kept, 0, HEAD * 3)] if tied else found
