"""Consecutive blocks.

Divide the samples 0 .. n-1 into one block of consecutive indices per rank, without communication: each rank computes
its own block from n, the number of ranks and its rank.

Returns an int64 array, (size,), in increasing order. Sizes differ by at most one, and the longer blocks come first.
Example: 7 samples on 3 ranks are [0, 1, 2], [3, 4] and [5, 6]; 2 samples on 3 ranks are [0], [1] and [].

Checked: that every sample is in exactly one block, for sizes that divide and sizes that do not; the sizes; that
arguments that make no sense raise ValueError, which the given first line does.

You may call:
    divmod(n, world_size)   quotient and remainder; min(a, b)
    numpy.arange(start, stop, dtype=numpy.int64)

Check it with: python -m exercises check block_partition

Stub aceb4eff.
"""

import numpy as np

from minidist.data.partition import _check


def block_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s block of 0..n-1; block sizes differ by at most one.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    raise NotImplementedError("return the indices of this rank's block")
