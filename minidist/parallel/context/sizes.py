"""Which sequences and heads a number of ranks can share, said without torch: before any rank starts."""

import math
from collections.abc import Callable

LAYOUTS = ("contiguous", "zigzag")
# The layout in which each form of attention is at its best: see `ring` and `ulysses`.
NATURAL = {"ring": "zigzag", "ulysses": "contiguous"}


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
            f"share equally under sequence parallelism; seq_len={_next(seq_len, parts(layout, size), size * tp)} would"
        )


def check_length(layout: str, seq_len: int, size: int) -> None:
    """Raise ValueError, with the sizes that would do, when the sequence cannot be shared equally in this layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}: there are {', '.join(LAYOUTS)}")
    count = parts(layout, size)
    if seq_len % count:
        each = "two equal chunks a rank" if layout == "zigzag" else "an equal part a rank"
        possible = _possible(lambda n: seq_len % parts(layout, n) == 0, min(seq_len, 4 * size))
        raise ValueError(
            f"seq_len={seq_len} cannot be shared by cp={size} ranks in the {layout} layout, {each}; "
            f"possible cp: {possible}; or seq_len={_next(seq_len, count)}"
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


def parts(layout: str, size: int) -> int:
    """Into how many equal parts the sequence is cut. A single rank holds it as it is, whatever its length."""
    return 2 * size if layout == "zigzag" and size > 1 else size


def _next(length: int, *factors: int) -> int:
    """The smallest number, at least `length`, that all the factors divide."""
    step = math.lcm(*factors)
    return -(-length // step) * step


def _possible(fits: Callable[[int], bool], most: int) -> str:
    return ", ".join(str(n) for n in range(1, most + 1) if fits(n))
