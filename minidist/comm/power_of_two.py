"""Fold any number of ranks onto a power of two, for algorithms that pair ranks off.

Of `size` ranks, `count`, the largest power of two not above `size`, are *active*; the other `size - count` are
*folded*. Among the first `2 * num_folded` ranks, each odd one hands its input to the even one before it and receives
its result from it at the end. Consecutive active ranks represent consecutive ranks, so their shards are contiguous in
memory. Rabenseifner 2004; Thakur et al. 2005, section 4.5.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PowerOfTwoRanks:
    """Divides the ranks of a group into *active* and *folded* ranks: of 6 ranks, 1 and 3 are folded.

    size: number of ranks in the group. An active rank also works for the rank folded into it: here 0 for 1, 2 for 3.
    """

    size: int

    @cached_property
    def count(self) -> int:
        """Number of active ranks: the largest power of two not above `size`."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_folded(self) -> int:
        """Number of folded ranks."""
        return self.size - self.count

    def is_folded(self, rank: int) -> bool:
        """Whether group rank `rank` is folded: rank `rank - 1` takes its input and sends it the result."""
        return rank < 2 * self.num_folded and rank % 2 == 1

    def folded_partner(self, rank: int) -> int | None:
        """Return the group rank that is folded into the active group rank `rank`, or None if there is none."""
        return rank + 1 if rank < 2 * self.num_folded else None

    def index(self, rank: int) -> int:
        """Return the number, from 0, of the active rank that works for group rank `rank`; for 6 ranks: 0 0 1 1 2 3."""
        return rank // 2 if rank < 2 * self.num_folded else rank - self.num_folded

    def rank(self, index: int) -> int:
        """Return the group rank of active rank number `index`; for 6 ranks: 0 2 4 5. `rank(count)` returns `size`."""
        return index + min(index, self.num_folded)
