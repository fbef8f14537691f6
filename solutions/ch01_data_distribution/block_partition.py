"""Consecutive blocks: the solution, as it stands in minidist.data.partition.

Every rank computes its own block without communication, so the formula must give blocks that are adjacent and never
overlap. Spreading the rest over the first ranks keeps the sizes within one sample of each other; the largest part
sets the time of a step. No sample is dropped or repeated, because either would change the gradient.

Usual wrong answers:
* every rank takes the rounded-up size, and the last ranks get the rest
* calls the package's function
* returns one fixed answer for every input
* includes the end index, so neighbouring blocks share a sample
* returns a list instead of an array
* fails for a rank without samples
* checks no arguments if there is no sample
* wrong on the second of three or more ranks only, if the sizes do not divide
* calls numpy's function
* drops the remainder of the division
* the last rank takes the remainder, and all others wait for it
* the start ignores that earlier blocks may be longer, so blocks overlap
* accepts a rank outside the world
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
