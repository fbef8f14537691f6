"""Context parallelism of a full model: its attention includes the parts of the sequence that other ranks hold.

The model's code is not imported and has no context parallelism: in each layer that has a `self_attn`, its `attend`
(query, key, value -> output, each head by itself) is replaced. The number of heads follows from the projections, so the
heads of a tensor-parallel rank are those of its shard.
"""

from functools import partial

from torch import nn

from minidist.comm import Group
from minidist.parallel.context.chunks import resolve_layout
from minidist.parallel.context.ring import ring_attention
from minidist.parallel.context.ulysses import ulysses_attention


def apply_context_parallel(model: nn.Module, group: Group, kind: str, layout: str | None = None) -> None:
    """Replace the attention of every layer of `model`, in place, by attention over sequences sharded over the group.

    model: a Transformer, possibly already split by pipeline and tensor parallelism. group: the ranks that shard the
    same sequences. kind: "ring" or "ulysses". layout: "zigzag" or "contiguous"; None: the default of `kind`. The caller
    passes each rank its tokens and labels (`shard_sequence`), and its `rank_positions`, both as the argument
    `positions` of `Transformer.forward` and in the `DropoutAddress`.

    Afterwards the loss of a sequence is the sum of the ranks' losses, and the gradient of a parameter, which every rank
    holds in full, is the sum of the ranks' local gradients. Raises ValueError for an unknown kind or layout;
    `validate_context_parallel` checks beforehand whether the sizes divide.
    """
    layout = resolve_layout(kind, layout)
    if group.size == 1:
        return
    for layer in model.model.layers:
        if not hasattr(layer, "self_attn"):
            continue  # another stage of the pipeline holds it
        attention = layer.self_attn
        if kind == "ring":
            attention.attend = partial(ring_attention, group=group, layout=layout)
        else:
            attention.attend = partial(ulysses_attention, attend=attention.attend, group=group, layout=layout)
