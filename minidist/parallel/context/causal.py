"""Which scores a rank computes when it holds the keys of another, and how much work that is.

Under the causal mask a query sees the keys at its own and earlier positions. Between the parts of the sequence that two
ranks hold, that leaves one of four cases, and none needs a mask that is not either a triangle or nothing:

    ==================  =======================  ================================
    keys come from      contiguous               zigzag
    ==================  =======================  ================================
    this rank           a triangle               a triangle
    an earlier rank     everything               all queries, first half of keys
    a later rank        nothing, skipped         second half of queries, all keys
    ==================  =======================  ================================

Zig-zag: rank r holds chunks r and 2n - 1 - r. Of an earlier rank both queries' chunks see the early chunk and neither
the late one; of a later rank the early queries see nothing and the late ones see both. Half of the scores either way,
as in the triangle: every rank computes as much as any other in each step, and none waits. Liu et al. 2023 (arXiv
2310.01889) go round contiguously; Brandon et al. 2023 (Striped Attention, arXiv 2311.09431) first evened it out, by
dealing out single positions; chunks leave the kernels the same triangles and rectangles.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Part:
    """A rectangle of scores between the queries of one rank and the keys of another, in places of what each holds.

    causal: only its lower triangle, diagonal included; the rectangle is then a square.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def scores(self) -> float:
        """How many scores that is, those on the diagonal of a triangle counted half: half of the square.

        Each element of the diagonal is where a square of the size of a token is itself cut in two. So counted, the work
        does not depend on how finely a sequence is divided into tokens.
        """
        rectangle = (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)
        return rectangle / 2 if self.causal else rectangle


def part(layout: str, rank: int, source: int, length: int) -> Part | None:
    """What `rank` computes with the keys of `source`, each holding `length` positions; None for nothing."""
    whole = slice(0, length)
    if source == rank:
        return Part(whole, whole, causal=True)
    if layout == "contiguous":
        return Part(whole, whole, causal=False) if source < rank else None
    early, late = slice(0, length // 2), slice(length // 2, length)
    return Part(whole, early, causal=False) if source < rank else Part(late, whole, causal=False)


def work(layout: str, size: int, length: int) -> list[list[float]]:
    """Scores that each rank computes in each step of the ring: `work(...)[step][rank]`, per head and sequence.

    In step t a rank has the keys of the rank t places before it. length: positions that each rank holds.
    """
    steps = [[part(layout, rank, (rank - step) % size, length) for rank in range(size)] for step in range(size)]
    return [[p.scores if p else 0 for p in parts] for parts in steps]


def efficiency(steps: list[list[float]]) -> Fraction:
    """Useful share of the ranks' time when each step lasts as long as its busiest rank: total / (ranks * that time).

    steps: as from `work`. Contiguous gives n / (2n - 1): one triangle (half a square) and n - 1 squares of time for n
    triangles and n (n - 1) / 2 squares of work. Zig-zag gives 1.
    """
    total, lasts = sum(map(sum, steps)), sum(map(max, steps))
    return Fraction(total) / (len(steps[0]) * Fraction(lasts))
