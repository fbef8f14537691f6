"""A whole model in, the same model out, whose attention looks at the parts of the sequence that other ranks hold.

The model knows nothing of this, and nothing is imported from it: a layer is known by its `self_attn`, whose `attend`
mixes values by queries and keys, heads apart. How many heads there are it reads from its projections, so a
tensor-parallel rank goes round with its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from minidist.comm import Group
from minidist.parallel.context.chunks import resolve_layout
from minidist.parallel.context.ring import ring_attention
from minidist.parallel.context.ulysses import ulysses_attention


def apply_context_parallel(model: nn.Module, group: Group, kind: str, layout: str | None = None) -> None:
    """Give the attention of every layer of `model` the form `kind`: "ring" or "ulysses".

    model: a Transformer, or what tensor parallelism left of one. group: ranks that see parts of the same sequences.
    layout: "zigzag" or "contiguous"; the natural one of the kind when None. The caller gives each rank its tokens and
    labels (`layout.cut`), and its `layout.positions` as the model's `positions` and as those of the dropout address.

    Afterwards the sum of the ranks' losses is that of the whole sequences. Every rank holds every parameter, and its
    gradient is a contribution: the sum over the group is the gradient. Raises ValueError for no such kind or layout;
    `validate_context_parallel` tells
    beforehand whether the sizes divide.
    """
    layout = resolve_layout(kind, layout)
    if group.size == 1:
        return
    for attention in _attentions(model):
        if kind == "ring":
            attention.attend = partial(ring_attention, group=group, layout=layout)
        else:
            attention.attend = partial(ulysses_attention, attend=attention.attend, group=group, layout=layout)


@contextmanager
def unsharded_attention(model: nn.Module) -> Iterator[None]:
    """Within this context, undo `apply_context_parallel`: every rank attends within the sequences it is given."""
    changed = {attention: vars(attention).pop("attend", None) for attention in _attentions(model)}
    try:
        yield
    finally:
        for attention, attend in changed.items():
            if attend is not None:
                attention.attend = attend


def _attentions(model: nn.Module) -> list[nn.Module]:
    """Of the layers that are here; other stages of a pipeline hold the rest."""
    return [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
