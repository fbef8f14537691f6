"""Which positions of a sequence each rank holds.

Everything but attention treats one position like another, so a rank does it for its own positions only. Two layouts:

* contiguous: rank r holds the r-th of n equal parts.
* zigzag: the sequence is cut into 2n equal chunks and rank r holds chunks r and 2n - 1 - r (Llama 3, arXiv 2407.21783,
  section 3.3.2). Under the causal mask a late query sees more keys than an early one; with one chunk of either, every
  rank has the same to compute (`causal.work`).

A rank's positions ascend in both, and it tells them to the model: rotary angles and dropout masks are functions of the
position in the whole sequence, and nothing else in the model asks where a token stands.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")
# The layout in which each form of attention is at its best: see `ring` and `ulysses`.
NATURAL = {"ring": "zigzag", "ulysses": "contiguous"}


def positions(layout: str, seq_len: int, size: int, rank: int) -> Tensor:
    """Where the tokens of `rank` of `size` stand in the unsplit sequence: (seq_len / size,) int64, ascending.

    Raises ValueError when there is no such layout, or it cannot share the sequence equally (`check_length`).
    """
    check_length(layout, seq_len, size)
    chunks = torch.arange(seq_len).view(_parts(layout, size), -1)
    return chunks[rank] if len(chunks) == size else torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def cut(tokens: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank with these positions (s / ranks,) sees of a batch: tokens and labels, (b, s) each, int64.

    The labels are shifted already: the label of a rank's last token is a token that another rank holds.
    """
    positions = positions.to(tokens.device)
    return tokens.index_select(1, positions), labels.index_select(1, positions)


def check(
    config, seq_len: int, size: int, kind: str, layout: str | None = None, tp: int = 1, sequence: bool = False
) -> None:
    """Raise ValueError, with the sizes that would do, when `size` ranks cannot share sequences of this length.

    config: a ModelConfig, of the unsplit model. kind: "ring" or "ulysses". layout: the natural one of the kind when
    None. tp: over how many ranks the heads are shared out already. sequence: whether those share each rank's part of
    the sequence too, outside of the operators.
    """
    layout = chosen(kind, layout)
    check_length(layout, seq_len, size)
    heads = config.num_heads // tp
    if kind == "ulysses" and heads % size:
        raise ValueError(
            f"num_heads={config.num_heads} over tp={tp} leaves {heads} query heads, which cp={size} ranks cannot share "
            f"equally in ulysses; possible cp: {_possible(lambda n: heads % n == 0, heads)}; or ring, for any heads"
        )
    if sequence and seq_len // size % tp:
        raise ValueError(
            f"seq_len={seq_len} over cp={size} leaves {seq_len // size} tokens a rank, which tp={tp} ranks cannot "
            f"share equally under sequence parallelism; seq_len={_next(seq_len, _parts(layout, size), size * tp)} would"
        )


def check_length(layout: str, seq_len: int, size: int) -> None:
    """Raise ValueError, with the sizes that would do, when the sequence cannot be shared equally in this layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}: there are {', '.join(LAYOUTS)}")
    parts = _parts(layout, size)
    if seq_len % parts:
        each = "two equal chunks a rank" if layout == "zigzag" else "an equal part a rank"
        possible = _possible(lambda n: seq_len % _parts(layout, n) == 0, min(seq_len, 4 * size))
        raise ValueError(
            f"seq_len={seq_len} cannot be shared by cp={size} ranks in the {layout} layout, {each}; "
            f"possible cp: {possible}; or seq_len={_next(seq_len, parts)}"
        )


def chosen(kind: str, layout: str | None) -> str:
    """The layout to use with a form of attention: the one asked for, or its natural one.

    Raises ValueError when there is no such form or no such layout.
    """
    if kind not in NATURAL:
        raise ValueError(f"no context parallelism {kind!r}: there are {', '.join(NATURAL)}")
    layout = layout or NATURAL[kind]
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}: there are {', '.join(LAYOUTS)}")
    return layout


def _parts(layout: str, size: int) -> int:
    """Into how many equal parts the sequence is cut. A single rank holds it as it is, whatever its length."""
    return 2 * size if layout == "zigzag" and size > 1 else size


def _next(length: int, *factors: int) -> int:
    """The smallest number, at least `length`, that all the factors divide."""
    step = math.lcm(*factors)
    return -(-length // step) * step


def _possible(fits: Callable[[int], bool], most: int) -> str:
    return ", ".join(str(n) for n in range(1, most + 1) if fits(n))
