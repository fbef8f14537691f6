"""Consecutive blocks: the solution, as it stands in minidist.data.partition.

Every rank computes its own block without communication, so the formula must give blocks that are adjacent and never
overlap. Spreading the rest over the first ranks keeps the sizes within one sample of each other; the largest part
sets the time of a step. No sample is dropped or repeated, because either would change the gradient.

Usual wrong answers:
* every rank takes the size rounded up, and the last ones get what is left
* the package's own block is called
* the same answer for every input
* the last index is included, so neighbours share a sample
* a list comes back where an array is asked for
* a rank without samples fails instead of having none
* wrong on one rank only, the second of three or more when sizes do not divide
* numpy cuts the blocks
* the rest of the division goes to nobody, so some samples are never seen
* the last rank takes the whole rest, and all others wait for it
* the start forgets that earlier blocks may be longer, so blocks overlap
* a rank outside the world gets samples
* zeros of the right length
"""

import numpy as np

from minidist.data.partition import _check


def block_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s block of 0..n-1; block sizes differ by at most one.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    size, longer = divmod(n, world_size)  # the first `longer` ranks hold one more
    start = rank * size + min(rank, longer)
    return np.arange(start, start + size + (rank < longer), dtype=np.int64)
