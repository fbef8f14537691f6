"""Any number of ranks on a power of two of seats: how algorithms that pair ranks off cope with the ranks left over.

Of `size` ranks, `core`, the largest power of two not above `size`, have a seat; `extra = size - core` have none. Among
the first `2 * extra` ranks each odd one hands its input to the even one before it, which sits for both, and gets its
result from it at the end. The ranks that a run of seats stands for are neighbours, so what they are due is one stretch
of memory. Rabenseifner 2004; Thakur et al. 2005, section 4.5.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Seats:
    """The seats of a group of `size` ranks."""

    size: int

    @cached_property
    def core(self) -> int:
        """Number of seats."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """Ranks without a seat."""
        return self.size - self.core

    def stands(self, rank: int) -> bool:
        """Whether `rank` has no seat: `rank - 1` sits for both."""
        return rank < 2 * self.extra and rank % 2 == 1

    def guest(self, rank: int) -> int | None:
        """The rank that the seated `rank` sits for besides itself."""
        return rank + 1 if rank < 2 * self.extra else None

    def of(self, rank: int) -> int:
        """The seat that stands for `rank`."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def first(self, seat: int) -> int:
        """The rank on `seat`, which is the first of those it stands for; `size` for the seat behind the last."""
        return seat + min(seat, self.extra)
