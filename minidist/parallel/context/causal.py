"""The attention scores that a rank computes against the keys of another rank, and how evenly that work is balanced.

Under the causal mask a query attends to keys at its own and earlier positions. Between the queries of one rank and the
keys of another this leaves one of four cases, each a full rectangle or a causal square:

    ==================  =======================  ================================
    keys come from      contiguous               zigzag
    ==================  =======================  ================================
    this rank           a triangle               a triangle
    an earlier rank     everything               all queries, first half of keys
    a later rank        nothing, skipped         second half of queries, all keys
    ==================  =======================  ================================

Zig-zag: rank r holds chunks r and 2n - 1 - r. Against an earlier rank all queries attend to its first chunk and none to
its second; against a later rank only the late queries attend, to both chunks. Either is half of the scores, as is the
triangle, so every rank computes equally much in each step. Liu et al. 2023 (arXiv 2310.01889) use the contiguous
layout; Brandon et al. 2023 (Striped Attention, arXiv 2311.09431) balance it by striding single positions; chunks keep
the kernels' shapes triangles and rectangles.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreBlock:
    """The attention scores of one rank's queries against one rank's keys: a block of the score matrix.

    queries, keys: slices of the two ranks' positions. causal: whether only the lower triangle of the block is computed,
    diagonal included; the block is then square.
    """

    queries: slice
    keys: slice
    causal: bool


def score_block(layout: str, rank: int, source: int, length: int) -> ScoreBlock | None:
    """Return the block of `rank`'s queries and the keys of rank `source`; None if the causal mask hides all of it.

    layout: "contiguous" or "zigzag". length: number of positions per rank.
    """
    whole = slice(0, length)
    if source == rank:
        return ScoreBlock(whole, whole, causal=True)
    if layout == "contiguous":
        return ScoreBlock(whole, whole, causal=False) if source < rank else None
    early, late = slice(0, length // 2), slice(length // 2, length)
    return ScoreBlock(whole, early, causal=False) if source < rank else ScoreBlock(late, whole, causal=False)
