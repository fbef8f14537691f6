"""Floating-point operations, and the time a pipeline loses.

Counted as `ModelConfig.flops_per_token` counts, which is what MFU is of: attention whole, though a causal kernel skips
half of it; nothing for a lookup, or for work done on several ranks alike (norms of tensor ranks, heads that several
hold). HFU is of these and of what is computed again.
"""

from minidist.config import Config
from minidist.process_groups import forward_flops
from minidist.tools.estimate.layout import Layout
from minidist.tools.simulate.timeline import Timeline, Times, simulate


def flops_per_token(layout: Layout, stage: int) -> int:
    """Forward and backward of a stage, for one token: `6 N + 12 l h s` of the layers and the head that it has.

    Over the stages they add up to `ModelConfig.flops_per_token`.
    """
    model, total = layout.config.model, 0
    for part in layout.chunks(stage):
        head = model.vocab_size * model.hidden_size + model.hidden_size if part.last else 0
        attention = 12 * len(part.layers) * model.hidden_size * layout.config.data.seq_len
        total += 6 * (len(part.layers) * model.layer_parameters + head) + attention
    return total


def repeats_whole(config: Config) -> bool:
    """Whether a layer that is computed again is so to its end: its last projection runs only where something after it
    is needed, a dropout mask, or where the layer is compiled into one piece."""
    return config.model.dropout > 0 or config.compile


def recomputed_per_layer(layout: Layout) -> int:
    """What backward computes again of a layer, for one token: products with weights and those of attention."""
    config = layout.config
    weights, attention, _ = forward_flops(config.model, config.data.seq_len)
    if config.recompute == "block":
        down = 2 * config.model.intermediate_size * config.model.hidden_size
        return weights + attention - (0 if repeats_whole(config) else down)
    return attention if config.recompute == "selective" else 0


def recomputed_per_token(layout: Layout, stage: int) -> int:
    """What backward computes again on a stage, for one token."""
    return sum(len(part.layers) for part in layout.chunks(stage)) * recomputed_per_layer(layout)


def timeline(layout: Layout, t_comm: float = 0.0) -> Timeline | None:
    """The pipeline's schedule when operations take as long as their FLOPs; None where there is one stage.

    A part's weights cost the same in F, B and W. The two products of attention have no weights: they cost twice as much
    in B as in F, and nothing in W. What is computed again is so in B. t_comm: of a transfer, in forwards of the
    costliest part.
    """
    if layout.schedule is None:
        return None
    weights, attention, head = forward_flops(layout.config.model, layout.config.data.seq_len)
    products = [len(part.layers) * weights + (head if part.last else 0) for part in layout.parts]
    mixing = [len(part.layers) * attention for part in layout.parts]
    unit = max(w + a for w, a in zip(products, mixing, strict=True))
    f = [(w + a) / unit for w, a in zip(products, mixing, strict=True)]
    again = [len(part.layers) * recomputed_per_layer(layout) for part in layout.parts]
    b = [(w + 2 * a + r) / unit for w, a, r in zip(products, mixing, again, strict=True)]
    return simulate(layout.schedule, Times(f, b, [w / unit for w in products], t_comm))
