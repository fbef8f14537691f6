"""How evenly the attention scores are distributed over the ranks of a context-parallel group."""

from fractions import Fraction

from minidist.parallel.context.causal import ScoreBlock, score_block


def scores_per_ring_step(layout: str, ring_size: int, tokens_per_rank: int) -> list[list[float]]:
    """Return the number of attention scores that each rank computes in each ring step, indexed [step][rank].

    Numbers are per head and sequence. In ring step t rank r has the keys of rank (r - t) % ring_size. layout: how the
    sequence is sharded, "contiguous" or "zigzag". ring_size: the number of context-parallel ranks.
    """
    ranks = range(ring_size)
    blocks = [
        [score_block(layout, rank, (rank - step) % ring_size, tokens_per_rank) for rank in ranks] for step in ranks
    ]
    return [[0 if block is None else _num_scores(block) for block in by_rank] for by_rank in blocks]


def _num_scores(block: ScoreBlock) -> float:
    """Return the number of scores computed; those on the diagonal of a triangle count half.

    Counted this way, each rank's fraction of the work does not depend on the sequence length.
    """
    rectangle = (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)
    return rectangle / 2 if block.causal else rectangle


def load_balance_efficiency(scores: list[list[float]]) -> Fraction:
    """Return the mean work of a rank divided by the duration of all ring steps; 1 is perfect balance.

    scores: from `scores_per_ring_step`. A ring step lasts as long as its busiest rank computes. The contiguous layout
    gives n / (2n - 1): the time is one triangle (half a square) and n - 1 squares, the total work n triangles and
    n (n - 1) / 2 squares. Zig-zag gives 1.
    """
    total, lasts = sum(map(sum, scores)), sum(map(max, scores))
    return Fraction(total) / (len(scores[0]) * Fraction(lasts))
