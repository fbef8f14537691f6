"""How context parallelism divides a sequence into chunks, and which layout each form of attention uses. No torch."""

LAYOUTS = ("contiguous", "zigzag")
# The layout that suits each form of attention: see `ring` and `ulysses`.
DEFAULT_LAYOUT = {"ring": "zigzag", "ulysses": "contiguous"}


def resolve_layout(kind: str, layout: str | None) -> str:
    """Return the layout in which ranks shard a sequence: `layout`, or by default the one that suits `kind`.

    kind: of attention, "ring" or "ulysses". layout: "contiguous", "zigzag" or None. Raises ValueError for an unknown
    kind or layout.
    """
    if kind not in DEFAULT_LAYOUT:
        raise ValueError(f"there is no context parallelism {kind!r}; possible: {', '.join(DEFAULT_LAYOUT)}")
    layout = layout or DEFAULT_LAYOUT[kind]
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; possible: {', '.join(LAYOUTS)}")
    return layout


def num_chunks(layout: str, cp: int) -> int:
    """Return the number of equal chunks into which `cp` ranks divide a sequence: 2 per rank for zigzag, else 1.

    A single rank keeps the sequence undivided, whatever its length.
    """
    return 2 * cp if layout == "zigzag" and cp > 1 else cp
