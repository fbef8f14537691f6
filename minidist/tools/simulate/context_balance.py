"""How evenly the ranks of a context-parallel group share the attention scores."""

from fractions import Fraction

from minidist.parallel.context.causal import ScoreBlock, score_block


def scores_per_ring_step(layout: str, ring_size: int, tokens_per_rank: int) -> list[list[float]]:
    """Count the scores that each rank computes in each ring step, per head and sequence: indexed [step][rank].

    In ring step t rank r holds the keys of rank r - t. layout: of the sequence, "contiguous" or "zigzag"; ring_size:
    the number of context-parallel ranks.
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
    """Return the mean work of a rank over the time of the ring, in which each step lasts as long as its busiest rank.

    scores: from `scores_per_ring_step`. The contiguous layout gives n / (2n - 1): the time is one triangle (half a
    square) and n - 1 squares, the total work n triangles and n (n - 1) / 2 squares. Zig-zag gives 1.
    """
    total, lasts = sum(map(sum, scores)), sum(map(max, scores))
    return Fraction(total) / (len(scores[0]) * Fraction(lasts))
